"""Loss and bits per byte on held-out text, and accuracy on multiple-choice probes.

Bits per byte are independent of the tokenizer: the loss in bits per token times the number of
tokens per byte of the same text.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hlat.config.run import Config
from hlat.data.data_loader import DataLoader
from hlat.data.heldout_sequences import HeldoutSequences
from hlat.engine.interface import Engine
from hlat.evaluate import multiple_choice_probes
from hlat.evaluate.inference_model import InferenceModel
from hlat.evaluate.multiple_choice_probes import MultipleChoiceQuestion
from hlat.tracking.tracker import Tracker

_SLOW_EVALUATION_S = 10.0
"""Duration after which an evaluation prints its progress."""


@dataclass(frozen=True)
class EvaluationData:
    """Held-out sequences by source, and questions by probe."""

    heldout: Mapping[str, HeldoutSequences]
    probes: Mapping[str, Sequence[MultipleChoiceQuestion]] = field(default_factory=dict)


def load_evaluation_data(config: Config, loader: DataLoader) -> EvaluationData:
    """Load held-out sequences and probes; raise ConfigError if text or questions are invalid."""
    heldout = loader.build_heldout_sequences(config.evaluation.sequences_per_source)
    return EvaluationData(heldout, multiple_choice_probes.load_probes(config))


def evaluate_heldout(engine: Engine, data: EvaluationData, tracker: Tracker, step: int) -> None:
    """Evaluate the current weights, and log an `evaluate` event.

    The event contains `loss`, the mean cross-entropy in nats per target token, and
    `bits_per_byte`, both by source and with their unweighted `mean`; `accuracy` by probe, if there
    are probes; and `seconds`, the duration.
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
