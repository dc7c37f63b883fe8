"""Curves over tokens: which numbers a figure shows, thinned without hiding any peak.

A long run logs more rows than a figure has pixels. Means would hide the spikes one looks for, so
each stretch keeps its smallest and largest value.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hlat.reporting.record import Record, Row, number, numbers

MAX_POINTS, MAX_TOGETHER = 6000, 12_000
"""Points of a curve, and of all curves of a figure; longer ones are thinned."""


@dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        label: Name in the legend.
        tokens: Where on the run it was measured, in tokens.
        values: What was measured; NaN where it was no finite number.
        steps: Where, in optimizer steps.
        hours: When, since the run began.
        errors: Standard errors of the values; None: they have none.
    """

    label: str
    tokens: NDArray[np.float64]
    values: NDArray[np.float64]
    steps: NDArray[np.float64]
    hours: NDArray[np.float64]
    errors: NDArray[np.float64] | None = None

    def at(self, places: NDArray[np.intp]) -> "Curve":
        """The curve at some of its points."""
        return Curve(
            self.label,
            self.tokens[places],
            self.values[places],
            self.steps[places],
            self.hours[places],
            None if self.errors is None else self.errors[places],
        )


def metric(record: Record, key: str) -> Curve:
    """A column of metrics.jsonl."""
    hours = (record.column("time") - record.began) / 3600
    return Curve(key, record.column("tokens"), record.column(key), record.column("step"), hours)


def data_wait(record: Record) -> Curve:
    """Share of the step time that waited for data, in percent."""
    wait, step = metric(record, "data_wait_seconds"), metric(record, "step_seconds")
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 100 * wait.values / step.values
    return replace(wait, label="data wait", values=np.where(np.isfinite(share), share, np.nan))


def heldout(record: Record) -> list[Curve]:
    """Bits per byte of held-out text, a curve per source, the mean last."""
    curves = _by_name(record, record.evaluations, "bits_per_byte")
    return sorted(curves, key=lambda curve: curve.label == "mean")


def scores(record: Record) -> list[Curve]:
    """Scores of evaluated checkpoints with their standard errors, a curve per task.

    They lie where the run was when it had come to their step, whenever they were measured.
    """
    found, logged = record.scores, metric(record, "step")
    known = np.isfinite(logged.steps) & np.isfinite(logged.hours)
    steps, hours = (
        array[known] if known.any() else [np.nan] for array in (logged.steps, logged.hours)
    )
    return [
        replace(curve, hours=np.interp(curve.steps, steps, hours), errors=_errors(curve, found))
        for curve in _by_name(record, found, "scores")
    ]


def places(record: Record, events: Iterable[Row]) -> Curve:
    """Where on the run some events happened; a curve without values."""
    found = list(events)
    steps = np.array([row["step"] for row in found], dtype=np.float64)
    tokens = [number(row, "tokens") for row in found]
    hours = (np.array([number(row, "time") for row in found]) - record.began) / 3600
    told = np.where(np.isnan(tokens), steps * tokens_per_step(record), tokens)
    return Curve("", told, np.full(len(found), np.nan), steps, hours)


def marks(record: Record, event: str) -> Curve:
    """Where on the run an event happened."""
    return places(record, (row for row in record.events if row.get("event") == event))


def tokens_per_step(record: Record) -> float:
    """Tokens of one optimizer step; NaN before the first row of metrics."""
    if not record.metrics:
        return float("nan")
    return number(record.metrics[-1], "tokens") / max(number(record.metrics[-1], "step"), 1)


def most_points(curves: int) -> int:
    """Points that each of the curves of a figure may have."""
    return min(MAX_POINTS, MAX_TOGETHER // max(1, curves))


def thin(curve: Curve, most: int = MAX_POINTS) -> Curve:
    """Keep the smallest and the largest value of each of equally long stretches.

    Args:
        curve: The curve.
        most: Points to keep; a shorter curve stays as it is.
    """
    if len(curve.values) <= most:
        return curve
    values = _stretches(curve.values, most // 2)
    first = np.arange(len(values)) * values.shape[1]
    lowest = first + np.where(np.isnan(values), np.inf, values).argmin(axis=1)
    highest = first + np.where(np.isnan(values), -np.inf, values).argmax(axis=1)
    return curve.at(np.unique(np.concatenate([lowest, highest])))


def means(curve: Curve, most: int = MAX_POINTS) -> Curve:
    """Return the mean of each of the stretches that `thin` keeps the ends of; a gap counts not."""
    if len(curve.values) <= most:
        return curve
    values = _stretches(curve.values, most // 2)
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean = np.where(known, values, 0).sum(axis=1) / known.sum(axis=1)
    middle = np.arange(len(values)) * values.shape[1] + values.shape[1] // 2
    return replace(curve.at(np.minimum(middle, len(curve.values) - 1)), values=mean)


def _errors(curve: Curve, scored: Mapping[int, Row]) -> NDArray[np.float64]:
    """The standard errors of a curve's scores; NaN where none is told."""
    rows = [numbers(scored[int(step)], "stderr") for step in curve.steps]
    return np.array([row.get(curve.label, np.nan) for row in rows])


def _stretches(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Cut values into at most so many rows; the last is filled up with NaN."""
    length = -(-len(values) // count)
    padded = np.full(-(-len(values) // length) * length, np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, length)


def _by_name(record: Record, rows: Mapping[int, Row], key: str) -> list[Curve]:
    """A curve for each name that is in the dictionaries of events, in the order of the alphabet."""
    measured = {step: numbers(row, key) for step, row in rows.items()}
    curves = []
    for name in sorted({name for found in measured.values() for name in found}):
        where = places(record, (rows[step] for step, found in measured.items() if name in found))
        values = np.array([found[name] for found in measured.values() if name in found])
        finite = np.where(np.isfinite(values), values, np.nan)
        curves.append(replace(where, label=name, values=finite))
    return curves
