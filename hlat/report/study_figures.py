"""Figures of a study: effects with intervals, bands over seeds, heat map, parallel coordinates.

Of a study with a grid of learning rates: the metric over the rate, with parabola and interval.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from hlat.config.lr_grid import LR_KEY
from hlat.config.study import Direction
from hlat.figures.report_figure import (
    FIGURE_SIZE,
    INK,
    MUTED,
    SERIES,
    ReportFigure,
    draw_legend,
    get_line_style,
)
from hlat.study.difference_format import format_interval, format_metric
from hlat.study.lr_optimum import OptimumStatus
from hlat.study.lr_tuning import LrTuning, format_rate, format_tuning
from hlat.study.metric_curves import Curve, build_metric_curve, downsample_mean
from hlat.study.paired_test import compute_mean_interval
from hlat.study.run_record import RunRecord
from hlat.study.study_analysis import Comparison, Point, Verdict, format_point
from hlat.study.study_result import StudyResult
from hlat.tracking.text_format import format_short

_MARKERS = {Verdict.better: "o", Verdict.worse: "o", Verdict.equal: "s", Verdict.undecided: "o"}
_MAX_LABEL = 44
_GRID_POINTS = 200
"""Positions at which the curves of several runs are averaged."""
_CURVE_POINTS = 100
_MAX_TICKS = 4
_DIVERGED_HEIGHT = 0.97
"""Height of the mark of a diverged rate as a fraction of the axis."""


def build_study_figures(result: StudyResult) -> list[ReportFigure]:
    """Return the figures of effects and factors that a study has values for."""
    figures = [build_forest_figure(result)] if result.comparisons else []
    factors = _list_factors(result)
    if len(factors) == 2 and all(len(values) > 1 for values in factors.values()):
        figures.append(build_heat_map(result))
    if len(factors) > 2:
        figures.append(build_parallel_coordinates(result))
    return figures


def build_forest_figure(result: StudyResult) -> ReportFigure:
    """Return the effects with their confidence intervals, one row per comparison."""
    rows = [one for one in result.comparisons if math.isfinite(one.difference.mean)]
    title = f"Difference to the baseline, {result.design.metric}"
    lines = [
        f"{one.label} {format_metric(one.difference.mean, signed=True)}"
        f" ({format_interval(one.difference.low, one.difference.high)}), {one.verdict.value}"
        for one in rows
    ]

    def draw() -> Figure:
        size = (FIGURE_SIZE[0], 1.0 + 0.65 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color=MUTED, linewidth=0.8)
        margin = result.design.smallest_difference
        if margin is not None:
            axes.axvspan(-margin, margin, color=MUTED, alpha=0.15, linewidth=0)
        for y, one in enumerate(reversed(rows)):
            difference = one.difference
            decided = one.verdict is not Verdict.undecided
            colour = SERIES[0] if decided else MUTED
            if math.isfinite(difference.low):
                axes.plot([difference.low, difference.high], [y, y], color=colour, linewidth=1.5)
            face = colour if decided else "none"
            axes.plot(difference.mean, y, _MARKERS[one.verdict], color=colour, markerfacecolor=face)
            label, place = _format_label(one), axes.get_yaxis_transform()
            axes.text(0, y + 0.2, label, transform=place, va="bottom", fontsize=9, color=INK)
        axes.set_yticks([])
        axes.set_ylim(-0.4, len(rows) - 0.1)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(f"difference in {result.metric_label}")
        axes.grid(axis="y", visible=False)
        return figure

    caption = (
        f"Mean over seeds and {100 * (1 - result.design.alpha):.3g}% interval of the difference, "
        "paired by seed. Hollow: not decided. "
    )
    if result.design.smallest_difference is not None:
        caption += f"Shaded: differences below {result.design.smallest_difference:g}."
    return ReportFigure("effects", f"{title}: {'; '.join(lines)}.", draw, title, caption.strip())


def build_heat_map(result: StudyResult) -> ReportFigure:
    """Return the mean of the metric for each combination of two factors."""
    (row_key, rows), (column_key, columns) = _list_factors(result).items()
    means = np.full((len(rows), len(columns)), np.nan)
    for point, one in result.points.items():
        by_key = dict(point)
        position = rows.index(by_key[row_key]), columns.index(by_key[column_key])
        means[position] = compute_mean_interval([*one.runs.values.values()])[0]
    title = f"{result.design.metric} by {row_key} and {column_key}"

    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        low, high = np.nanmin(means), np.nanmax(means)
        for (i, j), value in np.ndenumerate(means):
            share = 0.5 if high == low else (value - low) / (high - low)
            alpha = 0.0 if math.isnan(value) else 0.08 + 0.5 * share
            cell = Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=SERIES[0], alpha=alpha)
            axes.add_patch(cell)
            axes.text(j, i, format_metric(value), ha="center", va="center", color=INK, fontsize=9)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(column_key)
        axes.set_ylabel(row_key)
        axes.grid(visible=False)
        return figure

    cells = [
        f"{rows[i]}, {columns[j]}: {format_metric(value)}"
        for (i, j), value in np.ndenumerate(means)
    ]
    caption = f"Mean over the finished runs of each point. {result.metric_label}."
    return ReportFigure("heat_map", f"{title}: {'; '.join(cells)}.", draw, title, caption)


def build_parallel_coordinates(result: StudyResult) -> ReportFigure:
    """Return a line per point over its factors, and the metric as the last axis."""
    factors = _list_factors(result)
    means = {
        point: compute_mean_interval([*one.runs.values.values()])[0]
        for point, one in result.points.items()
    }
    means = {point: mean for point, mean in means.items() if math.isfinite(mean)}
    higher_is_better = result.design.direction is Direction.maximize
    title = f"{result.design.metric} over {len(factors)} factors"

    def draw() -> Figure:
        figure = Figure(figsize=(FIGURE_SIZE[0] * 1.4, FIGURE_SIZE[1]), layout="constrained")
        axes = figure.add_subplot()
        low, high = min(means.values()), max(means.values())
        for point, mean in means.items():
            heights = [_place(factors[key].index(value), len(factors[key])) for key, value in point]
            share = 0.5 if high == low else (mean - low) / (high - low)
            is_good = share > 0.75 if higher_is_better else share < 0.25
            colour, alpha = (SERIES[0], 0.9) if is_good else (MUTED, 0.35)
            axes.plot([*heights, share], color=colour, alpha=alpha, marker="o", markersize=3)
        for x, (_, values) in enumerate(factors.items()):
            for i, value in enumerate(values):
                axes.text(x, _place(i, len(values)), f" {value}", fontsize=8, color=INK)
        for height, mean in ((0, low), (1, high)):
            axes.text(len(factors), height, f" {format_metric(mean)}", fontsize=8, color=INK)
        axes.set_xticks(range(len(factors) + 1), [*factors, result.design.metric], fontsize=8)
        axes.set_yticks([])
        axes.set_xlim(-0.1, len(factors) + 0.4)
        return figure

    lines = [f"{format_point(point)}: {format_metric(mean)}" for point, mean in means.items()]
    caption = "A line per point; the best quarter of the range is highlighted."
    alt_text = f"{title}: {'; '.join(lines)}."
    return ReportFigure("parallel_coordinates", alt_text, draw, title, caption)


def build_band_figures(records: Sequence[RunRecord], result: StudyResult) -> list[ReportFigure]:
    """Return the loss over tokens, compute and time, with the range over the seeds of a point."""
    by_name = {record.name: record for record in records}
    axes: list[tuple[str, str, Callable[[RunRecord, Curve], NDArray[np.float64]]]] = [
        ("tokens", "tokens", lambda _, curve: curve.tokens),
        ("compute", "FLOPs", lambda record, curve: curve.tokens * record.flops_per_token),
        ("time", "hours", lambda _, curve: curve.hours),
    ]
    figures = []
    for name, unit, get_positions in axes:
        bands: dict[Point, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        for point, one in result.points.items():
            runs = [by_name[run] for run in one.run_names if run in by_name]
            if (band := _build_band(runs, get_positions)) is not None:
                bands[point] = band
        if bands:
            figures.append(_build_band_figure(name, unit, bands))
    return figures


def _build_band(
    records: Sequence[RunRecord], get_positions: Callable[[RunRecord, Curve], NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return common positions [n] and the losses of runs there [runs, n]; None without values."""
    lines = []
    for record in records:
        curve = downsample_mean(build_metric_curve(record, "loss"), 2 * _GRID_POINTS)
        positions, values = get_positions(record, curve), curve.values
        known = np.isfinite(positions) & np.isfinite(values)
        if known.sum() > 1:
            lines.append((positions[known], values[known]))
    if not lines:
        return None
    start = max(positions[0] for positions, _ in lines)
    end = min(positions[-1] for positions, _ in lines)
    if end <= start:
        return None
    grid = np.linspace(start, end, _GRID_POINTS)
    return grid, np.array([np.interp(grid, *line) for line in lines])


def _build_band_figure(
    name: str, unit: str, bands: dict[Point, tuple[NDArray[np.float64], NDArray[np.float64]]]
) -> ReportFigure:
    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes: Axes = figure.add_subplot()
        for i, (point, (grid, losses)) in enumerate(bands.items()):
            label = _shorten(_format_short_point(point))
            colour, style = get_line_style(i, label)
            axes.plot(grid, losses.mean(axis=0), color=colour, linestyle=style, label=label)
            if len(losses) > 1:
                low, high = losses.min(axis=0), losses.max(axis=0)
                axes.fill_between(grid, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(unit)
        axes.set_ylabel("nats per token")
        draw_legend(figure, *axes.get_legend_handles_labels())
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))
        return figure

    ends = [
        f"{format_point(point)}: {format_short(float(losses[:, -1].mean()))} at the end"
        for point, (_, losses) in bands.items()
    ]
    title = f"Training loss over {name}"
    caption = "Mean and range over the seeds of each point."
    return ReportFigure(f"loss_{name}", f"{title}; {'; '.join(ends)}.", draw, title, caption)


def _list_factors(result: StudyResult) -> dict[str, list[str]]:
    """Return the values of each factor in the order of the points."""
    factors: dict[str, dict[str, None]] = {}
    for point in result.points:
        for key, value in point:
            factors.setdefault(key, {})[value] = None
    return {key: [*values] for key, values in factors.items()}


def _format_label(comparison: Comparison) -> str:
    """Return what is compared, with the common factors in a second line."""
    pairs = [*zip(comparison.point, comparison.baseline, strict=True)]
    changed = [(one, other) for one, other in pairs if one != other]
    common = tuple(one for one, other in pairs if one == other)
    one, other = (_format_short_point(tuple(side)) for side in zip(*changed, strict=True))
    label = _shorten(f"{one} - {other}")
    return f"{label}\n{_shorten(_format_short_point(common))}" if common else label


def _format_short_point(point: Point) -> str:
    """Return the factors of a point with the last word of their keys."""
    names = [(key.removesuffix(".name").rpartition(".")[2], value) for key, value in point]
    return " ".join(f"{name}={value}" for name, value in names)


def _place(index: int, count: int) -> float:
    return 0.5 if count == 1 else index / (count - 1)


def _shorten(label: str) -> str:
    return label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"


def build_tuning_figures(result: StudyResult) -> list[ReportFigure]:
    """Return one figure per point, or one with all sizes for each setting of other factors."""
    if result.transfers:
        groups = [(one.point, [*one.tunings]) for one in result.transfers]
    else:
        groups = [(one.point, [one]) for one in result.tunings]
    return [
        _build_tuning_figure(result, number, format_point(point) if point else "", tunings)
        for number, (point, tunings) in enumerate(groups, start=1)
    ]


def _build_tuning_figure(
    result: StudyResult, number: int, name: str, tunings: Sequence[LrTuning]
) -> ReportFigure:
    title = f"{result.design.metric} over {LR_KEY}" + (f", {name}" if name else "")
    sign = -1 if result.design.direction is Direction.maximize else 1

    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        for index, one in enumerate(tunings):
            _draw_curve(axes, one, index, sign, _get_tuning_label(one, result))
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


def _get_tuning_label(one: LrTuning, result: StudyResult) -> str:
    over = result.design.lr_grid.transfer_over
    return format_point(one.point) if over is None else f"{over}={one.scale:g}"
