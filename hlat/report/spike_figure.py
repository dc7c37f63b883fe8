"""Length of gradient spikes (HLAT paper, figure 2).

A spike is a logged step whose gradient norm exceeds its running average by a margin (HLAT paper,
section IV-A). Spikes at consecutive logged steps count as one spike of that length.
"""

from collections import Counter

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hlat.figures.report_figure import FIGURE_SIZE, SERIES, ReportFigure
from hlat.study.run_record import RunRecord, get_number
from hlat.tracking.lost_work import exclude_rolled_back_events
from hlat.tracking.text_format import format_count, format_percent

_CAPTION = "Spike: the gradient norm exceeds its running average by recovery.spike_margin."


def count_spike_lengths(record: RunRecord) -> dict[int, int]:
    """Return the number of spikes of each length, in logged steps, in ascending order."""
    events = exclude_rolled_back_events(record.events)
    spike_steps = sorted({row["step"] for row in events if row.get("event") == "spike"})
    logged_steps = np.array([get_number(row, "step") for row in record.metrics])
    indices = np.searchsorted(logged_steps, spike_steps)
    starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(indices)).tolist()
    return dict(sorted(Counter(lengths).items()))


def build_spike_figure(counts: dict[int, int]) -> ReportFigure:
    """Return a bar chart of the spike lengths."""

    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        positions = range(len(counts))
        bars = axes.bar(positions, [*counts.values()], width=0.7, color=SERIES[0])
        axes.bar_label(bars, fontsize=9)
        axes.set_xticks(positions, [str(length) for length in counts])
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("consecutive logged steps")
        axes.set_ylabel("occurrences")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        return figure

    alt_text, title = format_alt_text(counts), "Length of gradient spikes"
    return ReportFigure("spikes", alt_text, draw, title, _CAPTION)


def format_alt_text(counts: dict[int, int]) -> str:
    """Return the alternative text of the figure."""
    total = sum(counts.values())
    single = format_percent(100 * counts.get(1, 0) / total)
    return (
        f"{format_count(total)} gradient spikes; {single} lasted a single logged step, the longest "
        f"{max(counts)}."
    )
