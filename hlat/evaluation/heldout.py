"""Loss and bits per byte on text that training never reads.

Bits per byte does not depend on the tokenizer: the loss in bits per token times the tokens that a
byte of this very text takes.
"""

import math
import time
from collections.abc import Mapping

from hlat.data.heldout import HeldOut
from hlat.engine.interface import Engine
from hlat.tracking.tracker import Tracker


def evaluate(engine: Engine, heldout: Mapping[str, HeldOut], tracker: Tracker, step: int) -> None:
    """Measure the model as it stands on every source, and record an `evaluate` event.

    The event holds `loss`, the mean cross-entropy in nats per counted token, and `bits_per_byte`,
    both by source and with `mean`, the plain mean over sources; and `seconds`, how long it took.
    """
    since = time.perf_counter()
    loss, bits = measure(engine, heldout)
    seconds = tracker.leave_out(since)
    tracker.event("evaluate", step, loss=loss, bits_per_byte=bits, seconds=seconds)
    tracker.say(
        f"step {step}: held-out bits per byte "
        + ", ".join(f"{name} {value:.3f}" for name, value in bits.items())
    )


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
