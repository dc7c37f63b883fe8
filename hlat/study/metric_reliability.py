"""Reliability of metrics during training: decision accuracy and signal-to-noise ratio.

A study can stop early, or use smaller runs, if a metric orders its points during training as the
metric of the study does at the end. Decision accuracy is that of DataDecide (arXiv 2504.11393): the
share of pairs of points in the same order. The signal-to-noise ratio is that of Signal and Noise
(arXiv 2508.13144): the largest difference between points, divided by the standard deviation of a
metric over the last evaluations of a run; the means in its numerator and denominator cancel.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from hlat.config.study import Direction, StudyConfig
from hlat.study.power import estimate_checkpoint_noise, pool_noise
from hlat.study.run_record import Row, RunRecord, get_numbers
from hlat.tracking.heldout_rows import get_loop_row
from hlat.tracking.text_format import UNKNOWN, format_short

RELIABLE_ACCURACY = 0.9
"""Decision accuracy from which a metric decides."""
_FRACTIONS = (0.25, 0.5, 0.75)
"""Parts of the run at which the table states the decision accuracy."""
_MIN_POINTS, _MIN_STEPS = 3, 3
_LOWER_IS_BETTER = ("heldout_", "perplexity", "bits_per_byte", "loss")
"""Parts of the names of metrics that decrease."""
Trajectory = Mapping[int, float]
"""Values of a metric of a run by step."""


@dataclass(frozen=True)
class MetricReliability:
    """Reliability of a metric over the points of a study.

    Attributes:
        metric: Name, as in study.metric.
        accuracies: Decision accuracy by step.
        decides_from: First step from which no accuracy is below `RELIABLE_ACCURACY`; None if there
            is none.
        signal_to_noise: Largest difference between points at the end over the noise of a run; NaN
            with fewer than three evaluations in the second half of a run.
    """

    metric: str
    accuracies: Mapping[int, float]
    decides_from: int | None
    signal_to_noise: float


def list_trajectories(record: RunRecord) -> dict[str, dict[int, float]]:
    """Return held-out bits per byte, probes and scores of a run by metric and step."""
    found: dict[str, dict[int, float]] = {}
    evaluations, scores = record.evaluations, record.scores
    groups: tuple[tuple[str, str, Mapping[int, Row]], ...] = (
        ("heldout_bits_per_byte", "bits_per_byte", _select_loop_rows(evaluations)),
        ("accuracy", "accuracy", evaluations),
        ("answer_bits_per_byte", "answer_bits_per_byte", evaluations),
        ("scores", "scores", scores),
        ("answer_bits_per_byte", "answer_bits_per_byte", scores),
    )
    for prefix, key, rows in groups:
        for step, row in rows.items():
            for name, value in get_numbers(row, key).items():
                if math.isfinite(value):
                    metric = prefix if name == "mean" else f"{prefix}.{name}"
                    found.setdefault(metric, {})[step] = value
    return found


def analyze_reliability(
    points: Sequence[Sequence[Mapping[str, Trajectory]]], design: StudyConfig
) -> list[MetricReliability]:
    """Return the reliability of each metric, those that decide earliest first.

    A metric that a run lacks is omitted. Fewer than three points or evaluations give none.

    Args:
        points: Trajectories by metric of each finished run of each point.
        design: Study, whose metric at the last common step orders the points.
    """
    points = [runs for runs in points if runs]
    reference = _average_runs(points, design.metric)
    if len(points) < _MIN_POINTS or len(reference) < _MIN_STEPS:
        return []
    target = reference[max(reference)]
    sign = -1.0 if design.direction is Direction.maximize else 1.0
    results = [
        _analyze_metric(points, metric, [sign * value for value in target])
        for metric in points[0][0]
        if len(_average_runs(points, metric)) >= _MIN_STEPS
    ]
    return sorted(results, key=_get_first_step)


def format_reliability_caption(results: Sequence[MetricReliability], design: StudyConfig) -> str:
    """Return the caption of the table, with the metrics that decide earliest."""
    first, last_step = results[0], max(results[0].accuracies)
    names = [one.metric for one in results if one.decides_from == first.decides_from]
    earliest = (
        f"none reaches {RELIABLE_ACCURACY:.0%} before the end"
        if first.decides_from in (None, last_step)
        else f"earliest: {', '.join(names)}, from step {first.decides_from:,} of {last_step:,}"
    )
    return (
        f"Metrics during training: pairs of points in the order of the last {design.metric}; "
        + earliest
    )


def build_reliability_table(
    results: Sequence[MetricReliability],
) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and a row for each metric."""
    parts = [f"at {part:.0%}" for part in _FRACTIONS]
    headers = ["Metric", *parts, f"{RELIABLE_ACCURACY:.0%} from step", "Signal / noise"]
    return headers, [_format_row(result) for result in results]


def compute_decision_accuracy(values: Sequence[float], target: Sequence[float]) -> float:
    """Return the share of pairs whose order in `values` is that in `target`.

    A pair that is equal in one of both only counts as a wrong decision.
    """
    agreements = [
        _compare(values[i], values[k]) == _compare(target[i], target[k])
        for i, k in combinations(range(len(target)), 2)
    ]
    return fmean(agreements)


def _analyze_metric(
    points: Sequence[Sequence[Mapping[str, Trajectory]]], metric: str, target: Sequence[float]
) -> MetricReliability:
    means = _average_runs(points, metric)
    sign = 1.0 if any(part in metric for part in _LOWER_IS_BETTER) else -1.0
    accuracies = {
        step: compute_decision_accuracy([sign * value for value in values], target)
        for step, values in means.items()
    }
    runs = [run[metric] for runs in points for run in runs]
    noise = pool_noise([estimate_checkpoint_noise([*run.values()]) for run in runs])
    last = means[max(means)]
    ratio = (max(last) - min(last)) / noise if noise else math.nan
    return MetricReliability(metric, accuracies, _find_first_reliable(accuracies), ratio)


def _average_runs(
    points: Sequence[Sequence[Mapping[str, Trajectory]]], metric: str
) -> dict[int, list[float]]:
    """Return the mean over the runs of each point at each step that all runs have."""
    if not all(metric in run for runs in points for run in runs):
        return {}
    steps = [set(run[metric]) for runs in points for run in runs]
    common = sorted(set.intersection(*steps) - {0}) if steps else []
    return {step: [fmean(run[metric][step] for run in runs) for runs in points] for step in common}


def _select_loop_rows(rows: Mapping[int, Row]) -> dict[int, Row]:
    return {step: get_loop_row(row) for step, row in rows.items()}


def _get_first_step(result: MetricReliability) -> float:
    return math.inf if result.decides_from is None else result.decides_from


def _find_first_reliable(accuracies: Mapping[int, float]) -> int | None:
    first = None
    for step in sorted(accuracies, reverse=True):
        if accuracies[step] < RELIABLE_ACCURACY:
            break
        first = step
    return first


def _format_row(result: MetricReliability) -> list[str]:
    steps = sorted(result.accuracies)
    parts = [max((s for s in steps if s <= part * steps[-1]), default=None) for part in _FRACTIONS]
    cells = [UNKNOWN if step is None else f"{result.accuracies[step]:.0%}" for step in parts]
    first = UNKNOWN if result.decides_from is None else f"{result.decides_from:,}"
    ratio = result.signal_to_noise
    return [result.metric, *cells, first, UNKNOWN if math.isnan(ratio) else format_short(ratio)]


def _compare(one: float, other: float) -> int:
    return (one > other) - (one < other)
