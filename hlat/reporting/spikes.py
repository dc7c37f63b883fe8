"""How long gradient spikes last: the paper's figure 2.

A spike is a logged step whose gradient norm is above its running average by a margin (HLAT paper,
section IV-A); spikes at logged steps in a row are one of that length.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hlat.reporting.figures import SERIES, SIZE, Picture
from hlat.reporting.record import Record, number
from hlat.reporting.wording import percent, whole
from hlat.tracking.replay import standing

NAME = "spikes"
"""File name without ending."""
TITLE = "Length of gradient spikes"
CAPTION = "A spike: a gradient norm above its running average by recovery.spike_margin."


def lengths(record: Record) -> dict[int, int]:
    """Return how many spikes there were of each length, in logged steps, in rising order."""
    events = standing(record.events)
    spiked = sorted({row["step"] for row in events if row.get("event") == "spike"})
    logged = np.array([number(row, "step") for row in record.metrics])
    found: Counter[int] = Counter()
    last, length = -1, 0
    for place in np.searchsorted(logged, spiked).tolist():
        if length and place != last + 1:
            found[length] += 1
            length = 0
        last, length = place, length + 1
    if length:
        found[length] += 1
    return dict(sorted(found.items()))


def picture(counted: dict[int, int]) -> Picture:
    """The picture of the lengths."""

    def paint(colours: Mapping[str, str]) -> Figure:
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        places = range(len(counted))
        bars = axes.bar(places, [*counted.values()], width=0.7, color=colours[SERIES[0]])
        axes.bar_label(bars, fontsize=9)
        axes.set_xticks(places, [str(length) for length in counted])
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("logged steps in a row")
        axes.set_ylabel("occurrences")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        return figure

    return Picture(NAME, describe(counted), paint)


def describe(counted: dict[int, int]) -> str:
    """What the figure shows, for those who do not see it."""
    total = sum(counted.values())
    single = percent(100 * counted.get(1, 0) / total)
    return (
        f"{whole(total)} gradient spikes; {single} lasted a single logged step, the longest "
        f"{max(counted)}."
    )
