"""The wall time of a run by category: a bar for the run, and one for each attempt.

All bars have the same length, so that short attempts, which may show what failed, are visible. The
duration of an attempt is part of its label.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hlat.recovery.goodput import AttemptTime, TimeLedger
from hlat.report import goodput_tables
from hlat.report.figures import FIGURE_SIZE, INK, MUTED, PAPER, SERIES, ReportFigure
from hlat.report.goodput_tables import TIME_CATEGORY_LABELS, get_seconds_by_category
from hlat.report.text_format import format_duration, format_percent

FIGURE_NAME = "time"
"""File name without extension."""
MAX_ATTEMPTS = 12
"""Maximum number of attempts in the figure; the last ones are drawn."""
_MIN_SHARE, _MIN_LABELLED_SHARE = 0.002, 0.08
_BAR_STYLES: dict[str, tuple[str, str | None]] = {
    "startup": (SERIES[3], None),
    "preflight": (SERIES[3], "////"),
    "compile": (SERIES[4], None),
    "steps": (SERIES[0], None),
    "data_wait": (SERIES[0], "////"),
    "evaluation": (SERIES[2], "////"),
    "checkpoint": (SERIES[2], None),
    "lost": (SERIES[1], None),
    "down": (MUTED, None),
    "unaccounted": (INK, "...."),
}
"""Colour and hatching by category; related categories share a colour."""


def build_goodput_figure(ledger: TimeLedger) -> ReportFigure:
    """Return a figure of the wall time by category."""
    entries: list[AttemptTime | TimeLedger] = [ledger]
    if len(ledger.attempts) > 1:
        entries += ledger.attempts[-MAX_ATTEMPTS:]
    shares = [_compute_shares(entry) for entry in entries]
    categories = [
        category
        for category in TIME_CATEGORY_LABELS
        if any(share[category] > _MIN_SHARE for share in shares)
    ]

    def draw() -> Figure:
        height = 0.85 + 0.33 * len(entries) + 0.22 * -(-len(categories) // 2)
        figure = Figure(figsize=(FIGURE_SIZE[0], height), layout="constrained")
        axes = figure.add_subplot()
        for row, share in enumerate(shares):
            _draw_bar(axes, row, share)
        axes.set_yticks(range(len(entries)), [_format_bar_label(entry) for entry in entries])
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of wall time")
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        patches = [
            Patch(label=TIME_CATEGORY_LABELS[category], **_get_bar_style(category))
            for category in categories
        ]
        figure.legend(handles=patches, loc="outside upper left", ncols=2, fontsize=9)
        return figure

    caption = goodput_tables.format_accounting_note(ledger)
    if len(ledger.attempts) > MAX_ATTEMPTS:
        caption = f"The last {MAX_ATTEMPTS} of {len(ledger.attempts)} attempts. {caption}"
    return ReportFigure(FIGURE_NAME, _format_alt_text(ledger), draw, caption=caption)


def _format_alt_text(ledger: TimeLedger) -> str:
    shares = [item for item in _compute_shares(ledger).items() if item[1] > _MIN_SHARE]
    parts = ", ".join(
        f"{TIME_CATEGORY_LABELS[category].lower()} {format_percent(100 * share)}"
        for category, share in sorted(shares, key=lambda item: -item[1])
    )
    return f"Wall time of {format_duration(ledger.wall_seconds)} by category: {parts}."


def _draw_bar(axes: Axes, row: int, shares: dict[str, float]) -> None:
    left = 0.0
    for category, share in shares.items():
        if share <= 0:
            continue
        style = _get_bar_style(category)
        axes.barh(row, 100 * share, left=100 * left, height=0.72, **style)
        if share >= _MIN_LABELLED_SHARE and style["hatch"] is None:
            middle, text = 100 * (left + share / 2), f"{100 * share:.0f}%"
            axes.text(middle, row, text, color=PAPER, ha="center", va="center", fontsize=9)
        left += share


def _get_bar_style(category: str) -> dict[str, Any]:
    colour, hatch = _BAR_STYLES[category]
    return {"facecolor": colour, "edgecolor": PAPER, "hatch": hatch, "linewidth": 0.7}


def _format_bar_label(entry: AttemptTime | TimeLedger) -> str:
    name = "all" if isinstance(entry, TimeLedger) else f"attempt {entry.number}"
    return f"{name}, {format_duration(entry.wall_seconds)}"


def _compute_shares(entry: AttemptTime | TimeLedger) -> dict[str, float]:
    return {
        category: seconds / entry.wall_seconds if entry.wall_seconds else 0.0
        for category, seconds in get_seconds_by_category(entry).items()
    }
