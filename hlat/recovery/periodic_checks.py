"""Checks between two training steps: replica equality, causality of attention, held-out loss.

The doctor runs the same checks before the run on a reduced model. These run on the real model, at
its own sequence length, in its current state.
"""

import math

import numpy as np

from hlat.config.config_errors import ExitCode
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.interface import Engine
from hlat.recovery import replica_verification
from hlat.tracking.heldout_rows import get_loop_row
from hlat.tracking.row_validation import get_mean
from hlat.tracking.tracker import Tracker


def run_periodic_checks(
    config: Config, engine: Engine, tracker: Tracker, step: int
) -> ExitCode | None:
    """Compare replicas and test causality; return the exit code of a failed check, else None.

    This is a collective call with the same result on all ranks.

    Raises:
        ReplicaMismatchError: Replicas differ and the faulty rank is unknown.
    """
    if not replica_verification.verify_replicas(engine, tracker, step):
        return ExitCode.UNHEALTHY_NODE
    first, second = (
        engine.read_metrics(engine.eval_step(sequences)).loss
        for sequences in build_causality_probe(config, step)
    )
    if not engine.parallel_state.world_group.any(abs(first - second) > 0):
        return None
    reason = f"later tokens change the loss of earlier positions from {first:.9g} to {second:.9g}"
    tracker.log_event("diverge", step, reason=reason)
    tracker.print_message(
        f"ERROR: {reason}: attention is not causal; run hlat doctor to find the layer"
    )
    return ExitCode.DIVERGED


def check_heldout_loss(
    config: Config, engine: Engine, tracker: Tracker, step: int
) -> ExitCode | None:
    """Compare the last held-out loss with the one before the first step.

    Return the exit code if it is not finite, or higher by recovery.spike_margin than that of random
    initial weights; else None. Trained initial weights may be better than the last ones, for
    example at the end of a warm-up. This is a collective call with the same result on all ranks.
    """
    rows = tracker.get_events("evaluate")
    loss_by_step = {row["step"]: get_mean(get_loop_row(row), "loss") for row in rows}
    started_randomly = config.model.init_from is None and config.checkpoint.start_from is None
    first = loss_by_step.get(0) if started_randomly else None
    last, reason = loss_by_step.get(step, math.nan), ""
    if last is None:
        reason = "the held-out loss is not finite"
    elif first is not None and last > first + config.recovery.spike_margin:
        reason = f"the held-out loss rose from {first:.4g} to {last:.4g}"
    if not engine.parallel_state.world_group.any(bool(reason)):
        return None
    tracker.log_event("diverge", step, reason=reason)
    tracker.print_message(f"ERROR: {reason}; use a lower optimizer.lr, or set optimizer.grad_clip")
    return ExitCode.DIVERGED


def build_causality_probe(config: Config, step: int) -> tuple[PackedSequences, PackedSequences]:
    """Return two micro batches of random tokens with a common prefix; only the prefix is counted.

    The counted positions use equal values in equal shapes, so a causal model gives bit-identical
    losses. The last prefix position predicts a token that differs and is excluded. A leak at that
    position still reaches earlier positions through the layers above.
    """
    layout, length, seed = config.parallelism, config.batch.sequence_length, config.run.seed
    dp = config.num_processes // (layout.tp * layout.pp)
    shape, generator = (dp * config.micro_batch_size, length), np.random.default_rng([seed, step])
    prefix = int(generator.integers(min(2, length - 1), length))
    first, second = generator.integers(0, config.model.vocab_size, (2, *shape), np.int32)
    second[:, :prefix] = first[:, :prefix]
    documents = np.zeros(shape, np.int32)
    target_mask = np.tile(np.arange(length) < prefix, (shape[0], 1))
    return (
        PackedSequences(first, documents, target_mask),
        PackedSequences(second, documents, target_mask),
    )
