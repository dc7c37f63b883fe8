"""Horizontal bars of equal length, each divided into the shares of categories."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hlat.figures.report_figure import FIGURE_SIZE, PAPER
from hlat.tracking.text_format import format_percent

Styles = Mapping[str, tuple[str, str, str | None]]
"""Label, colour and hatching by category."""
MIN_SHOWN_SHARE = 0.002
"""Share above which a category is named."""
_MIN_LABELLED_SHARE = 0.08


def draw_share_bars(
    bars: Sequence[tuple[str, Mapping[str, float]]],
    styles: Styles,
    categories: Sequence[str],
    axis_label: str,
) -> Figure:
    """Draw the shares of each bar, given its label, and a legend of some categories."""
    height = 0.85 + 0.33 * len(bars) + 0.22 * -(-len(categories) // 2)
    figure = Figure(figsize=(FIGURE_SIZE[0], height), layout="constrained")
    axes = figure.add_subplot()
    patches: dict[str, dict[str, Any]] = {
        name: {"facecolor": colour, "edgecolor": PAPER, "hatch": hatch, "linewidth": 0.7}
        for name, (_, colour, hatch) in styles.items()
    }
    for row, (_, shares) in enumerate(bars):
        left = 0.0
        for category, share in shares.items():
            if share <= 0:
                continue
            axes.barh(row, 100 * share, left=100 * left, height=0.72, **patches[category])
            if share >= _MIN_LABELLED_SHARE and styles[category][2] is None:
                middle, text = 100 * (left + share / 2), f"{100 * share:.0f}%"
                axes.text(middle, row, text, color=PAPER, ha="center", va="center", fontsize=9)
            left += share
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel(axis_label)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(label=styles[name][0], **patches[name]) for name in categories]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, fontsize=9)
    return figure


def format_shares(shares: Mapping[str, float], styles: Styles) -> str:
    """Return the percentages of the shares that are shown, in descending order."""
    shown = [item for item in shares.items() if item[1] > MIN_SHOWN_SHARE]
    return ", ".join(
        f"{styles[category][0].lower()} {format_percent(100 * share)}"
        for category, share in sorted(shown, key=lambda item: -item[1])
    )
