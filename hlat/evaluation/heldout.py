"""Loss and bits per byte on text that training never reads, and answers to the user's questions.

Bits per byte does not depend on the tokenizer: the loss in bits per token times the tokens that a
byte of this very text takes.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hlat.config.run import Config
from hlat.data.heldout import HeldOut
from hlat.data.loader import Loader
from hlat.engine.interface import Engine
from hlat.evaluation import probes
from hlat.evaluation.probes import Question
from hlat.evaluation.text_model import TextModel
from hlat.tracking.tracker import Tracker


@dataclass(frozen=True)
class Material:
    """What a run is measured on: held-out text by source, and questions by probe."""

    heldout: Mapping[str, HeldOut]
    probes: Mapping[str, Sequence[Question]] = field(default_factory=dict)


def material(config: Config, loader: Loader) -> Material:
    """Read what the configuration names.

    Raises:
        ConfigError: There is too little held-out text, or a file of questions is none.
    """
    return Material(loader.heldout(config.evaluation.sequences_per_source), probes.read(config))


def evaluate(engine: Engine, on: Material, tracker: Tracker, step: int) -> None:
    """Measure the model as it stands, and record an `evaluate` event.

    The event holds `loss`, the mean cross-entropy in nats per counted token, and `bits_per_byte`,
    both by source and with `mean`, the plain mean over sources; `accuracy` by probe, if there are
    any; and `seconds`, how long it took.
    """
    since = time.perf_counter()
    loss, bits = measure(engine, on.heldout)
    answers = {"accuracy": probes.accuracy(TextModel(engine), on.probes)} if on.probes else {}
    seconds = tracker.leave_out(since)
    tracker.event("evaluate", step, loss=loss, bits_per_byte=bits, **answers, seconds=seconds)
    told = [f"held-out bits per byte {_listed(bits)}"]
    told += [f"accuracy {_listed(found)}" for found in answers.values()]
    tracker.say(f"step {step}: {'; '.join(told)}")


def measure(
    engine: Engine, heldout: Mapping[str, HeldOut]
) -> tuple[dict[str, float], dict[str, float]]:
    """Loss and bits per byte by source, each with its mean over sources."""
    loss = {
        name: engine.read(engine.eval_step(text.sequences)).loss for name, text in heldout.items()
    }
    bits = {name: loss[name] / math.log(2) * text.tokens_per_byte for name, text in heldout.items()}
    loss["mean"] = sum(loss.values()) / len(loss)
    bits["mean"] = sum(bits.values()) / len(bits)
    return loss, bits


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())
