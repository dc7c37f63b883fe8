"""Points of a study: the metric and the signs of instability of the runs of each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.study import StudyConfig
from hlat.study.metric_reliability import Trajectory, list_trajectories
from hlat.study.paired_test import PointRuns
from hlat.study.power import estimate_checkpoint_noise, pool_noise
from hlat.study.run_record import Row, RunRecord, get_number, get_numbers
from hlat.study.summary_tables import get_run_state
from hlat.tracking.heldout_rows import get_loop_row
from hlat.tracking.summary_metrics import compute_summary_metrics

_EVALUATED_METRICS = {
    "heldout_bits_per_byte": "bits_per_byte",
    "accuracy": "accuracy",
    "answer_bits_per_byte": "answer_bits_per_byte",
    "scores": "scores",
}
"""Prefixes of metrics by source or task, and their fields in events."""


@dataclass(frozen=True)
class StudyPoint:
    """Runs of a point.

    Attributes:
        runs: Metric of each run by seed.
        run_names: Names of the runs.
        noise: Noise over the last evaluations of a run, pooled over the runs.
        summaries: Summary metrics of each run.
        initial_values: Metric before the first step by seed, if it is evaluated there.
        sources: Held-out bits per byte of the finished runs at the end, by source and seed.
        trajectories: Held-out bits per byte and scores of the finished runs by metric and step.
    """

    runs: PointRuns
    run_names: tuple[str, ...]
    noise: float
    summaries: tuple[dict[str, float], ...] = ()
    initial_values: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    trajectories: tuple[Mapping[str, Trajectory], ...] = ()


def build_study_point(
    runs: dict[str, RunRecord], metric: str, influences: dict[int, NDArray[np.float64] | None]
) -> StudyPoint:
    """Return the point with some runs, given by seed.

    `influences` are those of the documents on the metric by the id of a record.
    """
    summaries = {
        seed: compute_summary_metrics(record.metrics, record.events)
        for seed, record in runs.items()
    }
    evaluated = {seed: _list_evaluated_values(record, metric) for seed, record in runs.items()}
    states = {seed: get_run_state(record) for seed, record in runs.items()}
    values = {
        seed: _get_last(evaluated[seed], summaries[seed], metric)
        for seed in runs
        if states[seed] == "finish"
    }
    outcomes = PointRuns(
        {seed: value for seed, value in values.items() if math.isfinite(value)},
        frozenset(seed for seed, state in states.items() if state == "diverge"),
        {seed: found for seed in runs if (found := influences[id(runs[seed])]) is not None},
    )
    noises = [
        estimate_checkpoint_noise(_list_evaluated_values(runs[seed], metric, get_loop_row))
        for seed in outcomes.values
    ]
    return StudyPoint(
        outcomes,
        tuple(record.name for record in runs.values()),
        pool_noise(noises),
        tuple(summaries.values()),
        {seed: each[0] for seed, each in evaluated.items() if each},
        _list_sources({seed: runs[seed] for seed in outcomes.values}),
        tuple(list_trajectories(runs[seed]) for seed in outcomes.values),
    )


def get_metric(record: RunRecord, metric: str) -> float:
    """Return the metric of a run: of its summary, or of its last evaluation; NaN if missing."""
    summary = compute_summary_metrics(record.metrics, record.events)
    return _get_last(_list_evaluated_values(record, metric), summary, metric)


def get_scale(runs: Mapping[str, RunRecord], design: StudyConfig) -> float:
    """Return the value of study.lr_grid.transfer_over of a point; NaN if it is no number."""
    first = next(iter(runs.values()))
    return get_number(first.flat_config, design.lr_grid.transfer_over or "")


def find_unused_seed(seed: str, runs: Mapping[str, Any]) -> str:
    """Return the seed; a second run with the same one, as of other code, is not paired."""
    return seed if seed not in runs else f"{seed}#{len(runs)}"


def _list_sources(runs: Mapping[str, RunRecord]) -> dict[str, dict[str, float]]:
    """Return the bits per byte of the last evaluation by source and seed."""
    sources: dict[str, dict[str, float]] = {}
    for seed, record in runs.items():
        last = [*record.evaluations.values()][-1:]
        for row in last:
            for source, value in get_numbers(row, "bits_per_byte").items():
                sources.setdefault(source, {})[seed] = value
    sources.pop("mean", None)
    return sources


def _get_last(evaluated: list[float], summary: Mapping[str, float], metric: str) -> float:
    """Return the metric of a finished run: of its last evaluation, or of its summary."""
    if metric.partition(".")[2] and metric.partition(".")[0] in _EVALUATED_METRICS:
        return evaluated[-1] if evaluated else math.nan
    return summary.get(metric, math.nan)


def _list_evaluated_values(
    record: RunRecord, metric: str, select_row: Callable[[Row], Row] = lambda row: row
) -> list[float]:
    """Return the values of a metric at the evaluations of a run; empty for other metrics."""
    prefix, _, name = metric.partition(".")
    key = _EVALUATED_METRICS.get(prefix)
    if key is None:
        return []
    rows = record.scores if key == "scores" else record.evaluations
    values = [
        get_number(get_numbers(select_row(row), key), name or "mean") for row in rows.values()
    ]
    return [value for value in values if math.isfinite(value)]
