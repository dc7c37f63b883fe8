"""A run's memory and time of a step beside what the planner says of its configuration.

Who trusts a plan wants to see it fail. The planner's parts are drawn as its own figure draws them,
and what was measured as a line across; what it cannot tell, or nobody measured, is said in words.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hlat.config.errors import ConfigError
from hlat.config.told import run_of
from hlat.planning.memory import estimate
from hlat.planning.step_time import predict
from hlat.reporting.figures import INK, SERIES, Picture
from hlat.reporting.plan import MEMORY_LABELS, TIME_LABELS
from hlat.reporting.plan_figure import mark, waterfall
from hlat.reporting.record import Record
from hlat.reporting.wording import UNKNOWN, percent, short

NAME = "plan"
"""File name without ending."""
TITLE = "Beside the plan"
_WIDTH = 6.0
"""Inches: names of parts are long."""
_MEMORY, _TIME = "memory of the fullest device, GiB", "time of a step, s"


@dataclass(frozen=True)
class Part:
    """One thing that was planned and measured.

    Attributes:
        name: What it is, with its unit.
        planned: By part, in that unit; empty if the planner cannot tell.
        measured: In that unit; None if nobody measured it.
        note: What a reader must know to compare the two.
    """

    name: str
    planned: dict[str, float]
    measured: float | None
    note: str


def parts(record: Record) -> list[Part]:
    """Memory and time, planned and measured.

    Raises:
        ConfigError: The run's configuration is not one that can be planned.
    """
    config = run_of(record.config)
    memory = {MEMORY_LABELS[key]: size / 2**30 for key, size in asdict(estimate(config)).items()}
    held = _known(record, "memory_bytes")
    most = held.max() / 2**30 if len(held) else None
    time: dict[str, float] = {}
    try:
        step = asdict(predict(config))
        time = {label: step[key] for key, label in TIME_LABELS.items()}
        unknown = ""
    except ConfigError as error:
        unknown = f"No time is planned: {'; '.join(error.problems)}."
    taken, waited = _known(record, "step_seconds"), _known(record, "data_wait_seconds")
    median = float(np.median(taken)) if len(taken) else None
    note = "Measured: the median, with "
    note += (
        f"{short(float(np.median(waited)))} s that waited for data." if len(waited) else "waits."
    )
    return [
        Part(_MEMORY, memory, most, "Measured: the most that the first rank has held."),
        Part(_TIME, time, median, unknown or note),
    ]


def picture(found: list[Part]) -> Picture:
    """The picture of what can be drawn of the parts."""
    drawn = [part for part in found if part.planned]
    rows = [sum(size > 0 for size in part.planned.values()) for part in drawn]

    def paint(colours: Mapping[str, str]) -> Figure:
        height = 0.6 * len(drawn) + 0.25 * sum(rows)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        panels = figure.subplots(len(drawn), 1, height_ratios=rows, squeeze=False)[:, 0]
        for axes, part, colour in zip(panels, drawn, SERIES, strict=False):
            waterfall(axes, part.name, part.planned, colours[colour], colours[INK])
            if part.measured is not None:
                mark(axes, part.measured, f"measured {short(part.measured)}", colours)
        return figure

    return Picture(NAME, " ".join(map(describe, drawn)), paint)


def describe(part: Part) -> str:
    """What was planned and measured, in a sentence."""
    planned = short(sum(part.planned.values())) if part.planned else UNKNOWN
    measured = UNKNOWN if part.measured is None else short(part.measured)
    return f"{part.name[0].upper()}{part.name[1:]}: planned {planned}, measured {measured}."


def table(found: list[Part]) -> list[tuple[str, ...]]:
    """Per part: what it is of, its name, planned, measured, and how far the plan is off."""
    rows: list[tuple[str, ...]] = []
    for part in found:
        rows += [
            (part.name, label, short(size), "", "") for label, size in part.planned.items() if size
        ]
        total = sum(part.planned.values())
        measured = UNKNOWN if part.measured is None else short(part.measured)
        off = percent(100 * (total / part.measured - 1)) if total and part.measured else UNKNOWN
        rows.append((part.name, "all", short(total) if total else UNKNOWN, measured, off))
    return rows


def _known(record: Record, key: str) -> NDArray[np.float64]:
    values = record.column(key)
    return values[~np.isnan(values)]
