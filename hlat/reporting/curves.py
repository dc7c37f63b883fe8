"""Curves over tokens: which numbers a figure shows, thinned without hiding any peak.

A long run logs more rows than a figure has pixels. Means would hide the spikes one looks for, so
each stretch keeps its smallest and largest value.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.reporting.record import Record, number, numbers

MAX_POINTS = 2000
"""Points of a curve; longer ones are thinned to this many."""


@dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        label: Name in the legend.
        tokens: Where on the run it was measured, in tokens.
        values: What was measured; NaN where it was no finite number.
    """

    label: str
    tokens: NDArray[np.float64]
    values: NDArray[np.float64]


def metric(record: Record, key: str) -> Curve:
    """A column of metrics.jsonl."""
    return Curve(key, record.column("tokens"), record.column(key))


def data_wait(record: Record) -> Curve:
    """Share of the step time that waited for data, in percent."""
    wait, step = metric(record, "data_wait_seconds"), metric(record, "step_seconds")
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 100 * wait.values / step.values
    return Curve("data wait", wait.tokens, np.where(np.isfinite(share), share, np.nan))


def heldout(record: Record) -> list[Curve]:
    """Bits per byte of held-out text, a curve per source, the mean last."""
    per_step = tokens_per_step(record)
    measured = {step: numbers(row, "bits_per_byte") for step, row in record.evaluations.items()}
    sources = sorted({name for bits in measured.values() for name in bits})
    sources.sort(key=lambda name: name == "mean")
    return [
        _curve(
            source,
            [step * per_step for step, bits in measured.items() if source in bits],
            [bits[source] for bits in measured.values() if source in bits],
        )
        for source in sources
    ]


def marks(record: Record, event: str) -> list[float]:
    """Where on the run, in tokens, an event happened."""
    per_step = tokens_per_step(record)
    return [row["step"] * per_step for row in record.events if row.get("event") == event]


def tokens_per_step(record: Record) -> float:
    """Tokens of one optimizer step; NaN before the first row of metrics."""
    if not record.metrics:
        return float("nan")
    return number(record.metrics[-1], "tokens") / max(number(record.metrics[-1], "step"), 1)


def thin(curve: Curve) -> Curve:
    """Keep the smallest and the largest value of each of equally long stretches."""
    if len(curve.values) <= MAX_POINTS:
        return curve
    kept: set[int] = set()
    for stretch in np.array_split(np.arange(len(curve.values)), MAX_POINTS // 2):
        values = curve.values[stretch]
        if np.isnan(values).all():
            kept.add(int(stretch[0]))
        else:
            kept |= {int(stretch[np.nanargmin(values)]), int(stretch[np.nanargmax(values)])}
    indices = sorted(kept)
    return Curve(curve.label, curve.tokens[indices], curve.values[indices])


def _curve(label: str, tokens: list[float], values: list[float]) -> Curve:
    y = np.array(values, dtype=np.float64)
    return Curve(label, np.array(tokens, dtype=np.float64), np.where(np.isfinite(y), y, np.nan))
