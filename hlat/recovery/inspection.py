"""Looks between two steps for what no number of a run tells: copies that differ, masks that leak.

The doctor has looked before the run, with a small model. Here it is the model itself, at its own
length, after what has happened to it since.
"""

import numpy as np

from hlat.config.errors import Exit
from hlat.config.run import Config
from hlat.data.sequences import Sequences
from hlat.engine.interface import Engine
from hlat.recovery import copies
from hlat.tracking.tracker import Tracker


def verdict(config: Config, engine: Engine, tracker: Tracker, step: int) -> Exit | None:
    """Compare copies, and look for a leak; returns how the run must end, else None.

    All ranks call this, and get the same answer.

    Raises:
        CopiesDifferError: There is no telling which rank holds the state that is right.
    """
    if not copies.agree(engine, tracker, step):
        return Exit.UNHEALTHY_NODE
    losses = [engine.read(engine.eval_step(one)).loss for one in futures(config, step)]
    if not engine.world.everyone.any(abs(losses[0] - losses[1]) > 0):
        return None
    reason = f"later tokens move the loss of earlier ones from {losses[0]:.9g} to {losses[1]:.9g}"
    tracker.event("diverge", step, reason=reason)
    tracker.say(f"ERROR: {reason}: attention sees the future; python -m hlat.doctor tells where")
    return Exit.DIVERGED


def futures(config: Config, step: int) -> tuple[Sequences, Sequences]:
    """Two micro batches of random tokens, alike to some place; what comes after does not count.

    What counts of them is computed from the same numbers in the same shapes, so their losses are
    the same bits. The last position before the place predicts what differs and cannot count; what
    it sees too much of shows, through the layers above, in the positions before it.
    """
    layout, length, seed = config.parallelism, config.batch.sequence_length, config.run.seed
    dp = config.num_processes // (layout.tp * layout.pp)
    shape, lot = (dp * config.micro_batch_size, length), np.random.default_rng([seed, step])
    place = int(lot.integers(min(2, length - 1), length))
    one, other = lot.integers(0, config.model.vocab_size, (2, *shape), np.int32)
    other[:, :place] = one[:, :place]
    documents = np.zeros(shape, np.int32)
    return Sequences(one, documents, place - 1), Sequences(other, documents, place - 1)
