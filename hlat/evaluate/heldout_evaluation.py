"""Loss and bits per byte on held-out text, and accuracy on multiple-choice probes.

Bits per byte are independent of the tokenizer: the loss in bits per token times the number of
tokens per byte of the same text.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hlat.config.run import Config
from hlat.data.data_loader import DataLoader
from hlat.data.heldout_sequences import HeldoutSequences
from hlat.engine.interface import Engine
from hlat.evaluate import multiple_choice_probes, training_samples
from hlat.evaluate.inference_model import InferenceModel
from hlat.evaluate.multiple_choice_probes import MultipleChoiceQuestion
from hlat.evaluate.training_samples import SamplePrompts
from hlat.tracking.tracker import Tracker

_MAX_SHOWN_CHARACTERS = 100
"""Characters of a sample on the console."""
_SLOW_EVALUATION_S = 10.0
"""Duration after which an evaluation prints its progress."""


@dataclass(frozen=True)
class EvaluationData:
    """Held-out sequences by source, questions by probe, and prompts of samples."""

    heldout: Mapping[str, HeldoutSequences]
    probes: Mapping[str, Sequence[MultipleChoiceQuestion]] = field(default_factory=dict)
    samples: SamplePrompts | None = None


def load_evaluation_data(config: Config, loader: DataLoader) -> EvaluationData:
    """Load held-out sequences and probes; raise ConfigError if text or questions are invalid."""
    heldout = loader.build_heldout_sequences(config.evaluation.sequences_per_source)
    samples = training_samples.load_sample_prompts(config)
    return EvaluationData(heldout, multiple_choice_probes.load_probes(config), samples)


def evaluate_heldout(engine: Engine, data: EvaluationData, tracker: Tracker, step: int) -> None:
    """Evaluate the current weights, and log an `evaluate` event.

    The event contains `loss`, the mean cross-entropy in nats per target token, and
    `bits_per_byte`, both by source and with their unweighted `mean`; `accuracy` by probe, if there
    are probes; and `seconds`, the duration. A `samples` event follows if there are prompts.
    """
    since = time.perf_counter()

    def report_progress(source: str, num_done: int) -> None:
        seconds, total = time.perf_counter() - since, len(data.heldout)
        if num_done < total and seconds > _SLOW_EVALUATION_S:
            tracker.print_message(
                f"step {step}: evaluated {source}, {num_done} of {total} sources in {seconds:.0f} s"
            )

    loss, bits = compute_heldout_loss(engine, data.heldout, report_progress)
    accuracy: dict[str, dict[str, float]] = {}
    if data.probes:
        model = InferenceModel(engine)
        accuracy["accuracy"] = multiple_choice_probes.compute_accuracy(model, data.probes)
    seconds = tracker.exclude_time(since)
    tracker.log_event("evaluate", step, loss=loss, bits_per_byte=bits, **accuracy, seconds=seconds)
    messages = [
        f"{name} {', '.join(f'{source} {value:.3f}' for source, value in values.items())}"
        for name, values in {"held-out bits per byte": bits, **accuracy}.items()
    ]
    tracker.print_message(f"step {step}: {'; '.join(messages)}")
    if data.samples is not None:
        _log_samples(engine, data.samples, tracker, step)


def _log_samples(engine: Engine, prompts: SamplePrompts, tracker: Tracker, step: int) -> None:
    """Generate the samples, and log them as an event and on the console."""
    since = time.perf_counter()
    samples = training_samples.generate_samples(engine, prompts)
    tracker.log_event("samples", step, texts=samples, seconds=tracker.exclude_time(since))
    for sample in samples:
        prompt, text = json.dumps(sample["prompt"]), json.dumps(sample["text"])
        if len(text) > _MAX_SHOWN_CHARACTERS:
            text = f'{text[:_MAX_SHOWN_CHARACTERS]}..."'
        tracker.print_message(f"step {step}: {prompt} -> {text}")


def compute_heldout_loss(
    engine: Engine,
    heldout: Mapping[str, HeldoutSequences],
    on_progress: Callable[[str, int], None] = lambda source, num_done: None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return loss and bits per byte by source, each with its mean over sources.

    Call `on_progress` with the name of each evaluated source and their number.
    """
    loss: dict[str, float] = {}
    for name, text in heldout.items():
        loss[name] = engine.read(engine.eval_step(text.sequences)).loss
        on_progress(name, len(loss))
    bits = {name: loss[name] / math.log(2) * text.tokens_per_byte for name, text in heldout.items()}
    loss["mean"] = sum(loss.values()) / len(loss)
    bits["mean"] = sum(bits.values()) / len(bits)
    return loss, bits
