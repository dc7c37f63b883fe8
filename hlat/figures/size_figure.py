"""Figure of quantities over factors of a size, on logarithmic scales."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from hlat.figures.report_figure import SERIES, ReportFigure
from hlat.tracking.text_format import format_short


def build_size_figure(
    title: str,
    quantity: str,
    factors: Sequence[int],
    panels: Sequence[tuple[str, Mapping[str, Sequence[float]]]],
) -> ReportFigure:
    """Return a figure with a panel per size, given its name and the values of each line."""

    def draw() -> Figure:
        figure = Figure(figsize=(4.5 * len(panels), 3.8), layout="constrained")
        axes: NDArray[Any] = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for panel, (size, lines) in zip(axes, panels, strict=True):
            for colour, (label, values) in zip(SERIES, lines.items(), strict=False):
                panel.loglog(factors, values, color=colour, marker="o", markersize=3, label=label)
            panel.set_xticks(factors, [str(factor) for factor in factors])
            panel.minorticks_off()
            panel.set_xlabel(size)
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))
            panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)
        axes[0].set_ylabel(quantity)
        figure.suptitle(title, fontsize=10)
        return figure

    return ReportFigure("sizes", f"{quantity} over {', '.join(size for size, _ in panels)}", draw)
