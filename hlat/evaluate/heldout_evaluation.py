"""Loss and bits per byte on held-out text, and accuracy on multiple-choice probes.

Evaluations within a run are limited to a share of its computation. The last one evaluates more
text, of which the earlier ones evaluate a part.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from hlat.config.batch_steps import count_tokens
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.data.data_loader import DataLoader
from hlat.data.heldout_sequences import HeldoutSequences
from hlat.data.token_decoder import decode_continuation
from hlat.data.tokenizer import Tokenizer
from hlat.engine.interface import Engine
from hlat.evaluate import answer_bits, heldout_loss, multiple_choice_probes
from hlat.evaluate.heldout_loss import HeldoutLoss
from hlat.evaluate.multiple_choice_probes import MultipleChoiceQuestion
from hlat.inference.inference_model import InferenceModel
from hlat.optim.optimizer_spec import EMA, find_average
from hlat.tracking.heldout_rows import find_worse_sources
from hlat.tracking.tracker import Tracker

MAX_LOOP_SHARE = 0.05
"""Share of the computation of the steps between two evaluations that one of them may add."""
MIN_LOOP_TOKENS = 4096
"""Held-out tokens of each source that an evaluation has at least, if there are as many."""
_PASSES_PER_STEP = 3
"""Computation of a training step in forward passes; the backward pass costs two."""
_MAX_SHOWN_CHARACTERS = 100
"""Characters of a sample on the console."""
_SLOW_EVALUATION_S = 10.0
"""Duration after which an evaluation prints its progress."""


@dataclass(frozen=True)
class SamplePrompts:
    """Prompts of `evaluation.samples` with their token ids."""

    texts: list[str]
    ids: list[list[int]]
    tokenizer: Tokenizer
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class EvaluationData:
    """Held-out sequences by source, questions by probe, and prompts of samples.

    `heldout` is the text of the last evaluation, `loop` that of the others. With `uses_average`,
    the average of the weights is evaluated in their place; with `has_ema`, also their moving
    average.
    """

    heldout: Mapping[str, HeldoutSequences]
    loop: Mapping[str, HeldoutSequences]
    probes: Mapping[str, Sequence[MultipleChoiceQuestion]] = field(default_factory=dict)
    samples: SamplePrompts | None = None
    uses_average: bool = False
    has_ema: bool = False


def load_evaluation_data(config: Config, loader: DataLoader) -> EvaluationData:
    """Load held-out sequences and probes; raise ConfigError if text or questions are invalid."""
    length, evaluation = config.batch.sequence_length, config.evaluation
    heldout = loader.build_heldout_sequences(evaluation.count_sequences(length))
    loop = heldout
    if evaluation.sequences_per_source is None:
        count = max(1, _compute_loop_tokens(config, len(heldout)) // length)
        loop = {name: text.select_evenly(count) for name, text in heldout.items()}
    samples = load_sample_prompts(config)
    average, probes = find_average(config.optimizer), multiple_choice_probes.load_probes(config)
    has_ema = average is EMA
    return EvaluationData(
        heldout, loop, probes, samples, average is not None and not has_ema, has_ema
    )


def _compute_loop_tokens(config: Config, num_sources: int) -> int:
    """Return the held-out tokens of each source in an evaluation before the last one."""
    num_steps = config.evaluation.every_steps or compute_total_steps(config)
    num_passes = _PASSES_PER_STEP * count_tokens(num_steps, config.batch)
    return max(MIN_LOOP_TOKENS, int(MAX_LOOP_SHARE * num_passes / num_sources))


def evaluate_heldout(
    engine: Engine, data: EvaluationData, tracker: Tracker, step: int, is_last: bool = False
) -> None:
    """Evaluate the current weights, and log an `evaluate` event.

    The event contains the fields of `heldout_loss.summarize`; `accuracy` and `answer_bits_per_byte`
    by probe, if there are probes; the same fields for the moving average of the weights, `ema`, if
    there is one; and `seconds`, the duration. The last one also has the same fields for the text of
    the evaluations before it, `loop`, if that is less text, and the `clusters` of each source for
    comparisons by document. A `samples` event follows if there are prompts.
    """
    since = time.perf_counter()

    def report_progress(source: str, num_done: int) -> None:
        seconds, total = time.perf_counter() - since, len(data.heldout)
        if num_done < total and seconds > _SLOW_EVALUATION_S:
            tracker.print_message(
                f"step {step}: evaluated {source}, {num_done} of {total} sources in {seconds:.0f} s"
            )

    with engine.averaged_weights() if data.uses_average else nullcontext():
        fields = _compute_fields(engine, data, is_last, report_progress)
    if data.has_ema:
        with engine.averaged_weights():
            losses = evaluate_sources(engine, data.heldout if is_last else data.loop)
            fields["ema"] = _summarize(losses, engine, data, is_last)
    seconds = tracker.exclude_time(since)
    tracker.log_event("evaluate", step, **fields, seconds=seconds)
    tracker.print_message(f"step {step}: {format_evaluation(fields)}")
    if is_last:
        tokens, documents = (sum(fields[key].values()) for key in ("tokens", "documents"))
        tracker.print_message(
            f"step {step}: {tokens:,} held-out tokens of {documents:,} documents evaluated in "
            f"{seconds:.1f} s"
        )
        _warn_of_worse_sources(tracker, step)
    if data.samples is not None:
        with engine.averaged_weights() if data.uses_average else nullcontext():
            _log_samples(engine, data.samples, tracker, step)


def _compute_fields(
    engine: Engine,
    data: EvaluationData,
    is_last: bool,
    report_progress: Callable[[str, int], None],
) -> dict[str, Any]:
    """Return the fields of an `evaluate` event for the weights of the model."""
    losses = evaluate_sources(engine, data.heldout if is_last else data.loop, report_progress)
    fields = _summarize(losses, engine, data, is_last)
    if is_last:
        fields["clusters"] = {name: one.clusters for name, one in losses.items()}
    if data.probes:
        model = InferenceModel(engine)
        fields |= multiple_choice_probes.evaluate_probes(model, data.probes)
    return fields


def _summarize(
    losses: Mapping[str, HeldoutLoss], engine: Engine, data: EvaluationData, is_last: bool
) -> dict[str, Any]:
    """Return the fields of losses; at the end also those of the text of earlier evaluations."""
    fields = heldout_loss.summarize(losses)
    if is_last and any(data.heldout[name] is not text for name, text in data.loop.items()):
        fields["loop"] = heldout_loss.summarize(evaluate_sources(engine, data.loop))
    return fields


def format_evaluation(fields: Mapping[str, Any]) -> str:
    """Return bits per byte with standard errors, and accuracies, for the console."""
    errors = fields["stderr"]
    bits = [
        f"{'mean (equal weights)' if name == 'mean' else name} {value:.3f}"
        + (f" ± {errors[name]:.3f}" if name in errors else "")
        for name, value in fields["bits_per_byte"].items()
    ]
    text = f"held-out bits per byte {', '.join(bits)}"
    if accuracy := fields.get("accuracy"):
        bits_per_byte = fields[answer_bits.METRIC]
        probes = [
            f"{name} {value:.3f} ({bits_per_byte[name]:.3f} bits per byte of the answers)"
            for name, value in accuracy.items()
        ]
        text += f"; accuracy {', '.join(probes)}"
    if ema := fields.get("ema"):
        text += f"; moving average of the weights {ema['bits_per_byte']['mean']:.3f}"
    return text


def _warn_of_worse_sources(tracker: Tracker, step: int) -> None:
    """Log a `heldout_worse` event and print a line for each source that became worse."""
    rows = tracker.get_events("evaluate")
    worse = find_worse_sources(rows[0], rows[-1]) if rows else {}
    if worse:
        tracker.log_event("heldout_worse", step, bits_per_byte=worse)
    for name, (before, after) in worse.items():
        tracker.print_message(
            f"WARNING: held-out text of {name} is worse than at the start of the run: "
            f"{before:.3f} -> {after:.3f} bits per byte; give data.sources.{name} a larger weight"
        )


def _log_samples(engine: Engine, prompts: SamplePrompts, tracker: Tracker, step: int) -> None:
    """Generate the samples, and log them as an event and on the console."""
    since = time.perf_counter()
    samples = generate_samples(engine, prompts)
    tracker.log_event("samples", step, texts=samples, seconds=tracker.exclude_time(since))
    for sample in samples:
        prompt, text = json.dumps(sample["prompt"]), json.dumps(sample["text"])
        if len(text) > _MAX_SHOWN_CHARACTERS:
            text = f'{text[:_MAX_SHOWN_CHARACTERS]}..."'
        tracker.print_message(f"step {step}: {prompt} -> {text}")


def evaluate_sources(
    engine: Engine,
    heldout: Mapping[str, HeldoutSequences],
    on_progress: Callable[[str, int], None] = lambda source, num_done: None,
) -> dict[str, HeldoutLoss]:
    """Return the loss by source.

    Call `on_progress` with the name of each evaluated source and their number.
    """
    losses: dict[str, HeldoutLoss] = {}
    for name, text in heldout.items():
        losses[name] = heldout_loss.compute_heldout_loss(engine, text)
        on_progress(name, len(losses))
    return losses


def load_sample_prompts(config: Config) -> SamplePrompts | None:
    """Return the prompts; None if there are none. Raise ConfigError if one is too long."""
    settings, data = config.evaluation.samples, config.data
    if not settings.prompts:
        return None
    tokenizer = Tokenizer(
        *(data.tokenizer, data.root, data.eos_token),
        bos_token=data.bos_token,
        max_lost_text=data.max_lost_text,
    )
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    encoded = [ids.tolist() for ids in tokenizer.encode_chunks(settings.prompts)]
    ids = [[*bos, *one] or [tokenizer.eos_token_id] for one in encoded]
    longest, length = max(map(len, ids)), config.batch.sequence_length
    if longest + settings.max_tokens > length:
        raise ConfigError(
            f"evaluation.samples.max_tokens={settings.max_tokens} and a prompt of {longest} tokens "
            f"exceed batch.sequence_length={length}; use shorter prompts or fewer tokens"
        )
    return SamplePrompts(
        settings.prompts,
        ids,
        tokenizer,
        settings.max_tokens,
        settings.temperature,
        config.run.seed,
    )


def generate_samples(engine: Engine, prompts: SamplePrompts) -> list[dict[str, str]]:
    """Return `prompt` and generated `text` of each prompt; all ranks call it.

    The random numbers are a function of run.seed and the prompt's index, so that the texts of two
    evaluations differ by the weights only. Generation changes no state of the training.
    """
    tokenizer, eos = prompts.tokenizer, prompts.tokenizer.eos_token_id
    generated = InferenceModel(engine).generate(
        prompts.ids,
        prompts.max_tokens,
        is_finished=lambda ids: ids[-1] == eos,
        temperature=prompts.temperature,
        seed=prompts.seed,
    )
    samples = []
    for text, prompt, ids in zip(prompts.texts, prompts.ids, generated, strict=True):
        tokens = ids[:-1] if ids[-1] == eos else ids
        continuation = decode_continuation(tokenizer, prompt, tokens)
        samples.append({"prompt": text, "text": continuation})
    return samples
