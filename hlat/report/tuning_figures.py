"""Figures of the best learning rates: metric over the rate, with parabola and interval."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from hlat.config.lr_grid import LR_KEY
from hlat.config.study import Direction
from hlat.figures.report_figure import FIGURE_SIZE, INK, ReportFigure, get_line_style
from hlat.study.lr_optimum import OptimumStatus
from hlat.study.lr_tuning import LrTuning, format_rate, format_tuning
from hlat.study.study_analysis import format_point
from hlat.study.study_result import StudyResult

_CURVE_POINTS = 100
_MAX_TICKS = 4
_DIVERGED_HEIGHT = 0.97
"""Height of the mark of a diverged rate as a fraction of the axis."""


def build_tuning_figures(result: StudyResult) -> list[ReportFigure]:
    """Return one figure per point, or one with all sizes for each setting of other factors."""
    if result.transfers:
        groups = [(one.point, [*one.tunings]) for one in result.transfers]
    else:
        groups = [(one.point, [one]) for one in result.tunings]
    return [
        _build_figure(result, number, format_point(point) if point else "", tunings)
        for number, (point, tunings) in enumerate(groups, start=1)
    ]


def _build_figure(
    result: StudyResult, number: int, name: str, tunings: Sequence[LrTuning]
) -> ReportFigure:
    title = f"{result.design.metric} over {LR_KEY}" + (f", {name}" if name else "")
    sign = -1 if result.design.direction is Direction.maximize else 1

    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        for index, one in enumerate(tunings):
            _draw_curve(axes, one, index, sign, _get_label(one, result))
        axes.set_xscale("log")
        rates = sorted({rate for one in tunings for rate in one.curve.rates})
        axes.set_xticks(rates[:: math.ceil(len(rates) / _MAX_TICKS)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(LR_KEY)
        axes.set_ylabel(result.metric_label.partition(",")[0].replace("_", " "))
        if len(tunings) > 1:
            figure.legend(loc="outside upper left", fontsize=7, ncols=3)
        return figure

    caption = (
        "Dots: runs. Line: parabola through the fitted rates, moved to the mean over seeds. "
        "Vertical line and band: optimum and its interval within the grid. Crosses at the top: "
        "rates with diverged runs, which are not fitted."
    )
    lines = [format_tuning(one, result.design) for one in tunings]
    alt_text = f"{title}: {'; '.join(lines)}."
    return ReportFigure(f"lr_{number}", alt_text, draw, title, caption)


def _draw_curve(axes: Axes, one: LrTuning, index: int, sign: int, label: str) -> None:
    colour, style = get_line_style(index, label)
    curve, optimum = one.curve, one.optimum
    rates = np.broadcast_to(curve.rates, curve.values.shape)
    axes.plot(rates.ravel(), sign * curve.values.ravel(), "o", color=colour, markersize=3)
    diverged = curve.rates[curve.num_diverged > 0]
    heights = np.full(len(diverged), _DIVERGED_HEIGHT)
    place = axes.get_xaxis_transform()
    axes.plot(diverged, heights, "x", color=INK, markersize=5, transform=place)
    if not len(optimum.fitted):
        axes.plot([], [], color=colour, linestyle=style, label=label)
        return
    grid = np.geomspace(optimum.fitted[0], optimum.fitted[-1], _CURVE_POINTS)
    axes.plot(grid, sign * optimum.predict(grid), color=colour, linestyle=style, label=label)
    if optimum.status is OptimumStatus.found:
        axes.axvline(optimum.rate, color=colour, linewidth=0.8, linestyle=style)
        if math.isfinite(optimum.low):
            low, high = np.clip([optimum.low, optimum.high], curve.rates[0], curve.rates[-1])
            axes.axvspan(low, high, color=colour, alpha=0.12, linewidth=0)


def _get_label(one: LrTuning, result: StudyResult) -> str:
    over = result.design.lr_grid.transfer_over
    return format_point(one.point) if over is None else f"{over}={one.scale:g}"
