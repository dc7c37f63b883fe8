"""Metrics of extensions during training."""

import time

from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.interface import Engine
from hlat.tracking.tracker import Tracker


def compute_due_metrics(
    config: Config, step: int, engine: Engine, sequences: PackedSequences, tracker: Tracker
) -> dict[str, float]:
    """Return the metrics that are due after a step on rank 0, else {}.

    Their time is excluded from the training time.
    """
    names, interval = config.tracking.metrics, config.tracking.metrics_every
    if not names or step % interval:
        return {}
    start = time.perf_counter()
    values = engine.compute_metrics(names, sequences)
    tracker.exclude_time(start)
    return values
