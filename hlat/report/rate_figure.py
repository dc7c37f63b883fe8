"""Metric over the learning rate for each setting of a study, side by side for other factors."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from hlat.config.lr_grid import LR_KEY
from hlat.config.study import Direction
from hlat.figures.report_figure import FIGURE_SIZE, ReportFigure, get_line_style
from hlat.study.difference_format import format_metric
from hlat.study.lr_tuning import LrTuning, format_rate
from hlat.study.study_analysis import Point, format_point
from hlat.study.study_result import StudyResult

_NUM_COLUMNS = 2
_DIVERGED_HEIGHT = 0.97
"""Height of the mark of diverged runs as a fraction of the axis."""
_MARK_DISTANCE = 0.05
"""Distance of the marks of two settings, as a fraction of the axis."""
_MAX_TICKS = 4
_CHARACTER_INCHES, _HANDLE_INCHES = 0.075, 0.5
"""Width of a character and of the line in a legend with a font of 8 points."""


def build_rate_figure(result: StudyResult) -> ReportFigure:
    """Return the means over seeds by learning rate: a line for each value of the compared factors.

    Settings with other values of the other factors are in another panel.
    """
    panels = _group_panels(result)
    title = f"{result.design.metric} over {LR_KEY}"
    sign = -1.0 if result.design.direction is Direction.maximize else 1.0

    def draw() -> Figure:
        num_columns = min(_NUM_COLUMNS, len(panels))
        num_rows = math.ceil(len(panels) / num_columns)
        size = (FIGURE_SIZE[0] * (1.4 if num_columns > 1 else 1), FIGURE_SIZE[1] * num_rows)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(num_rows, num_columns, sharey=True, sharex=True, squeeze=False)
        for axes, (context, lines) in zip(grid.flat, panels.items(), strict=False):
            _draw_panel(axes, lines, sign)
            axes.set_title(format_point(context) if context else "", fontsize=9, loc="left")
        for axes in [*grid.flat][len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(result.metric_label.partition(",")[0].replace("_", " "))
        for axes in grid[-1]:
            axes.set_xlabel(LR_KEY)
        _draw_legend(figure, grid.flat[0])
        return figure

    caption = (
        "Lines: means over the finished runs of each rate; dots: runs; crosses at the top: rates "
        "with diverged runs."
    )
    texts = [
        f"{format_point(one.point)}: {_format_curve(one, sign)}"
        for lines in panels.values()
        for _, one in lines
    ]
    return ReportFigure("rates", f"{title}; {'; '.join(texts)}.", draw, title, caption)


def _draw_legend(figure: Figure, axes: Axes) -> None:
    """Draw a legend that fits in the figure; a key that all labels begin with is its title."""
    handles, labels = axes.get_legend_handles_labels()
    keys = {label.partition("=")[0] for label in labels}
    title = ""
    if len(keys) == 1 and not any(" " in label for label in labels):
        (title,) = keys
        labels = [label.partition("=")[2] for label in labels]
    label_width = _CHARACTER_INCHES * max(map(len, labels)) + _HANDLE_INCHES
    num_columns = max(1, int(figure.get_figwidth() / label_width))
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        title=title,
        alignment="left",
        fontsize=8,
        title_fontsize=8,
        ncols=num_columns,
    )


def _group_panels(result: StudyResult) -> dict[Point, list[tuple[str, LrTuning]]]:
    """Return the settings with their labels by the values of the factors without a baseline."""
    panels: dict[Point, list[tuple[str, LrTuning]]] = {}
    for one in result.tunings:
        compared = tuple(pair for pair in one.point if pair[0] in result.design.baseline)
        context = tuple(pair for pair in one.point if pair not in compared)
        panels.setdefault(context, []).append((format_point(compared), one))
    return panels


def _draw_panel(axes: Axes, lines: Sequence[tuple[str, LrTuning]], sign: float) -> None:
    for index, (label, one) in enumerate(lines):
        colour, style = get_line_style(index, label)
        rates = np.broadcast_to(one.curve.rates, one.curve.values.shape)
        axes.plot(rates.ravel(), sign * one.curve.values.ravel(), ".", color=colour, markersize=4)
        axes.plot(*_compute_means(one, sign), color=colour, linestyle=style, label=label)
        diverged = one.curve.rates[one.curve.num_diverged > 0]
        heights = np.full(len(diverged), _DIVERGED_HEIGHT - _MARK_DISTANCE * index)
        place = axes.get_xaxis_transform()
        axes.plot(diverged, heights, "x", color=colour, markersize=5, transform=place)
    axes.set_xscale("log")
    rates = np.unique(np.concatenate([one.curve.rates for _, one in lines]))
    axes.set_xticks(rates[:: math.ceil(len(rates) / _MAX_TICKS)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _compute_means(one: LrTuning, sign: float) -> tuple[list[float], list[float]]:
    """Return the rates with a finished run, and the mean metric of each."""
    columns = [column[np.isfinite(column)] for column in one.curve.values.T]
    known = [n for n, column in enumerate(columns) if len(column)]
    return (
        [float(one.curve.rates[n]) for n in known],
        [sign * float(columns[n].mean()) for n in known],
    )


def _format_curve(one: LrTuning, sign: float) -> str:
    """Return the lowest mean with its rate, and the rates with diverged runs."""
    rates, means = _compute_means(one, sign)
    if not rates:
        return "no finished run"
    best = min(range(len(means)), key=lambda n: sign * means[n])
    diverged = [format_rate(rate) for rate in one.curve.rates[one.curve.num_diverged > 0]]
    text = f"best {format_metric(means[best])} at {format_rate(rates[best])}"
    return f"{text}, diverged at {', '.join(diverged)}" if diverged else text
