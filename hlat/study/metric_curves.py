"""Curves of a run over tokens, downsampled without losing peaks.

A long run logs more rows than a figure has pixels. As means would hide spikes, each window of a
curve keeps its smallest and largest value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.study.run_record import Row, RunRecord, get_number, get_numbers
from hlat.tracking.heldout_rows import get_average_row, get_loop_row

MAX_POINTS_PER_CURVE, MAX_POINTS_PER_FIGURE = 6000, 12_000


@dataclass(frozen=True)
class Curve:
    """A line of a figure; all arrays have the shape (points,).

    `tokens`, `steps` (optimizer steps) and `hours` (since the start of the run) are positions.
    Values are NaN if missing or not finite. `errors` are standard errors; None if the values have
    none. `lows` and `highs` are the limits of a band over seeds. `flops_per_token` is NaN if it is
    unknown. `kind` is "run" for one run and "band" for all seeds of a comparison. `style` contains
    the indices of the colour and of the line style; None: the index of the curve.
    """

    label: str
    tokens: NDArray[np.float64]
    values: NDArray[np.float64]
    steps: NDArray[np.float64]
    hours: NDArray[np.float64]
    errors: NDArray[np.float64] | None = None
    lows: NDArray[np.float64] | None = None
    highs: NDArray[np.float64] | None = None
    flops_per_token: float = float("nan")
    kind: str = ""
    style: tuple[int, int] | None = None

    def select(self, indices: NDArray[np.intp]) -> "Curve":
        """Return a curve of the points at `indices`."""
        selected: dict[str, Any] = {
            name: value[indices] if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }
        return Curve(**selected)


def build_metric_curve(record: RunRecord, key: str) -> Curve:
    """Return the curve of a column of metrics.jsonl."""
    tokens, values, steps, times = map(record.get_column, ("tokens", key, "step", "time"))
    hours = (times - record.start_time) / 3600
    return Curve(key, tokens, values, steps, hours, flops_per_token=record.flops_per_token)


def build_data_wait_curve(record: RunRecord) -> Curve:
    """Return the percentage of the step time spent waiting for data."""
    curve = build_metric_curve(record, "data_wait_seconds")
    with np.errstate(divide="ignore", invalid="ignore"):
        percent = 100 * curve.values / record.get_column("step_seconds")
    return replace(curve, label="data wait", values=np.where(np.isfinite(percent), percent, np.nan))


def build_heldout_curves(record: RunRecord) -> list[Curve]:
    """Return the bits per byte of each held-out source, and their mean as the last curve.

    All points are those of the text that the run evaluates between its steps.
    """
    rows = {step: row | get_loop_row(row) for step, row in record.evaluations.items()}
    curves = _build_curves_by_name(record, rows, "bits_per_byte")
    return sorted(curves, key=lambda curve: curve.label == "mean")


def build_average_curves(record: RunRecord) -> list[Curve]:
    """Return the mean over sources for the moving average of the weights; empty without one."""
    averages = {step: get_average_row(row) for step, row in record.evaluations.items()}
    rows = {step: record.evaluations[step] | row for step, row in averages.items() if row}
    curves = _build_curves_by_name(record, rows, "bits_per_byte")
    return [replace(one, label="mean, moving average") for one in curves if one.label == "mean"]


def build_score_curves(record: RunRecord) -> list[Curve]:
    """Return the scores of evaluated checkpoints with standard errors, a curve per task.

    A score is placed at the time of its step in the run, not at the time of its evaluation.
    """
    scores, logged = record.scores, build_metric_curve(record, "step")
    known = np.isfinite(logged.steps) & np.isfinite(logged.hours)
    steps, hours = (
        array[known] if known.any() else [np.nan] for array in (logged.steps, logged.hours)
    )
    return [
        replace(
            curve,
            hours=np.interp(curve.steps, steps, hours),
            errors=_get_standard_errors(curve, scores),
        )
        for curve in _build_curves_by_name(record, scores, "scores")
    ]


def build_band_curve(label: str, curves: Sequence[Curve]) -> Curve:
    """Return the mean over seeds, with the smallest and largest value at each step as band.

    The positions are those of the seed with the most steps; other seeds are interpolated up to
    their last step. A single curve has no band.
    """
    longest = max(curves, key=lambda curve: np.nanmax(curve.steps, initial=-np.inf))
    if len(curves) == 1:
        return replace(longest, label=label, kind="band")
    values = np.array([_interpolate(curve, longest.steps) for curve in curves])
    known = ~np.isnan(values)
    num_known = known.sum(axis=0)
    with np.errstate(invalid="ignore"):
        mean = np.where(known, values, 0).sum(axis=0) / num_known
    lows = np.where(known, values, np.inf).min(axis=0)
    highs = np.where(known, values, -np.inf).max(axis=0)
    lows, highs = (np.where(num_known > 0, limit, np.nan) for limit in (lows, highs))
    return replace(longest, label=label, kind="band", values=mean, lows=lows, highs=highs)


def locate_rows(record: RunRecord, rows: Iterable[Row]) -> Curve:
    """Return the positions of events as a curve without values."""
    rows = list(rows)
    steps = np.array([row["step"] for row in rows], dtype=np.float64)
    tokens = np.array([get_number(row, "tokens") for row in rows])
    hours = (np.array([get_number(row, "time") for row in rows]) - record.start_time) / 3600
    tokens = np.where(np.isnan(tokens), interpolate_tokens(record, steps), tokens)
    missing = np.full(len(rows), np.nan)
    return Curve("", tokens, missing, steps, hours, flops_per_token=record.flops_per_token)


def locate_marks(record: RunRecord) -> dict[str, Curve]:
    """Return the positions of restarts, changed settings, and phases after the first.

    They are curves without values.
    """
    events = [(row.get("event"), row) for row in record.events]
    return {
        "resumed": locate_rows(record, [row for name, row in events if name == "resume"]),
        "changed": locate_rows(record, [{"step": step} for step in record.setting_changes]),
        "phases": locate_rows(record, [r for name, r in events if name == "phase" and r["step"]]),
    }


def interpolate_tokens(record: RunRecord, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the tokens after some steps, between rows of metrics.jsonl by their mean rate.

    NaN before the first row is written. After the last row, the last mean rate continues.
    """
    if not record.metrics:
        return np.full(len(steps), np.nan)
    rows = [(get_number(row, "step"), get_number(row, "tokens")) for row in record.metrics]
    known = np.array([(0.0, 0.0), *rows])
    index = np.clip(np.searchsorted(known[:, 0], steps), 1, len(rows))
    (first, start), (last, end) = known[index - 1].T, known[index].T
    rate = (end - start) / np.maximum(last - first, 1)
    return np.asarray(start + (steps - first) * rate, np.float64)


def compute_max_points(num_curves: int) -> int:
    """Return the maximum number of points of each curve in a figure, at least one window's."""
    return max(2, min(MAX_POINTS_PER_CURVE, MAX_POINTS_PER_FIGURE // max(1, num_curves)))


def downsample_min_max(curve: Curve, max_points: int = MAX_POINTS_PER_CURVE) -> Curve:
    """Return a curve with the smallest and largest value of each of `max_points / 2` windows."""
    if len(curve.values) <= max_points:
        return curve
    values = _split_into_windows(curve.values, max_points // 2)
    first = np.arange(len(values)) * values.shape[1]
    lowest = first + np.where(np.isnan(values), np.inf, values).argmin(axis=1)
    highest = first + np.where(np.isnan(values), -np.inf, values).argmax(axis=1)
    return curve.select(np.unique(np.concatenate([lowest, highest])))


def downsample_mean(curve: Curve, max_points: int = MAX_POINTS_PER_CURVE) -> Curve:
    """Return a curve with the mean, without NaN, of each window of `downsample_min_max`."""
    if len(curve.values) <= max_points:
        return curve
    values = _split_into_windows(curve.values, max_points // 2)
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean = np.where(known, values, 0).sum(axis=1) / known.sum(axis=1)
    middle = np.arange(len(values)) * values.shape[1] + values.shape[1] // 2
    return replace(curve.select(np.minimum(middle, len(curve.values) - 1)), values=mean)


def _interpolate(curve: Curve, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of a curve at other steps; NaN before its first and after its last step."""
    known = ~np.isnan(curve.values) & ~np.isnan(curve.steps)
    if not known.any():
        return np.full(len(steps), np.nan)
    return np.interp(steps, curve.steps[known], curve.values[known], left=np.nan, right=np.nan)


def _get_standard_errors(curve: Curve, score_rows: Mapping[int, Row]) -> NDArray[np.float64]:
    rows = [get_numbers(score_rows[int(step)], "stderr") for step in curve.steps]
    return np.array([row.get(curve.label, np.nan) for row in rows])


def _split_into_windows(values: NDArray[np.float64], num_windows: int) -> NDArray[np.float64]:
    """Return values with shape (windows, length), padded with NaN."""
    length = -(-len(values) // num_windows)
    padded = np.full(-(-len(values) // length) * length, np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, length)


def _build_curves_by_name(record: RunRecord, rows: Mapping[int, Row], key: str) -> list[Curve]:
    """Return a curve for each name in the dictionaries `key` of events, in alphabetical order."""
    by_step = {step: get_numbers(row, key) for step, row in rows.items()}
    curves = []
    for name in sorted({name for numbers in by_step.values() for name in numbers}):
        steps = [step for step, numbers in by_step.items() if name in numbers]
        values = np.array([by_step[step][name] for step in steps])
        finite = np.where(np.isfinite(values), values, np.nan)
        curve = locate_rows(record, [rows[step] for step in steps])
        curves.append(replace(curve, label=name, values=finite))
    return curves
