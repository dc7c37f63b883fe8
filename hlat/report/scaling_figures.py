"""Figures of scaling fits, and the numbers in them as CSV files."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from hlat.figures.report_figure import FIGURE_SIZE, INK, MUTED, SERIES, ReportFigure, get_line_style
from hlat.report.report_writer import write_figures
from hlat.storage.durable_files import replace_file
from hlat.study.compute_law import ComputeLaw
from hlat.study.hyperparameter_law import HyperparameterLaw
from hlat.study.power_law import Array
from hlat.study.scaling_analysis import ScalingAnalysis
from hlat.study.scaling_fit import CONFIDENCE, Interval, ScalingFit
from hlat.study.scaling_points import ScalingPoints

_CURVE_POINTS = 100
_MARKER_SIZE = 3


def write_scaling_figures(analysis: ScalingAnalysis, output_dir: Path) -> list[str]:
    """Write the figures as SVG and PNG and their numbers as CSV; return the names of the tables."""
    figures, tables = [build_fit_figure(analysis)], {"fit": _build_fit_rows(analysis.fit)}
    if analysis.held_out is not None:
        tables["held_out"] = _build_held_out_rows(analysis, analysis.held_out)
    if analysis.curves:
        figures.append(build_isoflop_figure(analysis))
        tables["isoflop"] = _build_isoflop_rows(analysis)
    if analysis.compute_law is not None:
        grid = build_grid(analysis, analysis.compute_law)
        figures.append(build_compute_figure(analysis, analysis.compute_law, grid))
        tables["compute"] = _build_compute_rows(analysis.compute_law, grid)
    for law in analysis.laws:
        figures.append(build_law_figure(law, analysis.budgets))
        tables[figures[-1].name] = _build_law_rows(law)
    write_figures(output_dir, figures)
    for name, rows in tables.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        replace_file(output_dir / f"{name}.csv", text.getvalue().encode())
    return [*tables]


def build_fit_figure(analysis: ScalingAnalysis) -> ReportFigure:
    """Return losses and the loss of the best allocation over compute, with residuals below."""
    fit = analysis.fit
    points, held_out = fit.points, analysis.held_out
    end = (points if held_out is None else held_out).flops.max()
    grid = np.geomspace(points.flops.min(), end, _CURVE_POINTS)

    def draw() -> Figure:
        figure = Figure(figsize=(FIGURE_SIZE[0], 1.5 * FIGURE_SIZE[1]), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        style: dict[str, Any] = {"color": SERIES[0], "markersize": _MARKER_SIZE}
        top.plot(points.flops, points.losses, "o", label="points", **style)
        if held_out is not None:
            held_style = style | {"markerfacecolor": "none"}
            top.plot(held_out.flops, held_out.losses, "o", label="held out", **held_style)
            predicted = [one.run.value for one in analysis.held_out_predictions]
            errors = 100 * np.log(held_out.losses / predicted)
            bottom.plot(held_out.flops, errors, "o", **held_style)
        losses = [fit.compute_optimum(float(flops)).loss for flops in grid]
        _draw_band(top, grid, losses, "best allocation")
        top.set_ylabel(points.metric.replace("_", " "))
        top.legend(fontsize=8)
        bottom.axhline(0, color=MUTED, linewidth=0.8)
        bottom.plot(points.flops, 100 * fit.residuals, "o", **style)
        bottom.set_ylabel("residual, %")
        _format_log_axis(bottom, "FLOPs")
        return figure

    size = 100 * np.abs(fit.residuals)
    alt_text = (
        f"Fit of {len(points)} points: residuals have a median of {np.median(size):.3g} % and a "
        f"maximum of {size.max():.3g} %."
    )
    caption = f"Band: {CONFIDENCE:.0%} interval of the best loss at each compute."
    return ReportFigure("fit", alt_text, draw, "Fit of parameters and tokens", caption)


def build_isoflop_figure(analysis: ScalingAnalysis) -> ReportFigure:
    """Return the loss over parameters at each budget, with parabola and optimum."""
    points = analysis.fit.points

    def draw() -> Figure:
        figure = Figure(figsize=(FIGURE_SIZE[0], 1.3 * FIGURE_SIZE[1]), layout="constrained")
        axes = figure.add_subplot()
        for index, curve in enumerate(analysis.curves):
            label = f"{curve.flops:.3g}"
            colour, style = get_line_style(index, label)
            sizes, losses = points.parameters[curve.indices], points.losses[curve.indices]
            axes.plot(sizes, losses, "o", color=colour, markersize=_MARKER_SIZE)
            grid = np.geomspace(sizes.min(), sizes.max(), _CURVE_POINTS)
            axes.plot(grid, curve.predict(grid), color=colour, linestyle=style, label=label)
            if curve.has_optimum:
                axes.plot(curve.parameters.value, curve.loss, "*", color=INK, markersize=7)
        axes.set_ylabel(points.metric.replace("_", " "))
        _format_log_axis(axes, "parameters")
        figure.legend(loc="outside upper left", title="FLOPs", ncols=4, fontsize=7)
        return figure

    lines = [
        f"{curve.flops:.3g} FLOPs: {curve.parameters.value:.3g} parameters"
        for curve in analysis.curves
        if curve.has_optimum
    ]
    caption = "Dots: points. Lines: parabolas over log N. Stars: certain optima."
    alt_text = f"IsoFLOP curves; optima: {'; '.join(lines) or 'none'}."
    return ReportFigure("isoflop", alt_text, draw, "IsoFLOP curves", caption)


def build_compute_figure(analysis: ScalingAnalysis, law: ComputeLaw, grid: Array) -> ReportFigure:
    """Return the loss over compute with a band, up to the largest requested budget."""

    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.plot(law.flops, law.losses, "o", color=SERIES[0], markersize=_MARKER_SIZE)
        _draw_band(axes, grid, law.predict(grid), "E + A / C^gamma")
        axes.axvline(law.flops.max(), color=MUTED, linestyle="dashed", linewidth=0.8)
        axes.set_ylabel(analysis.fit.points.metric.replace("_", " "))
        _format_log_axis(axes, "FLOPs")
        axes.legend(fontsize=8)
        return figure

    end = law.predict(grid[-1:])[0]
    of = "optima of IsoFLOP curves" if law.of_curves else "points with the lowest loss"
    caption = (
        f"Dots: {of}. Band: {CONFIDENCE:.0%} interval of the curve. Dashed: largest fitted compute."
    )
    alt_text = f"Loss over compute: {end.value:.4g} at {grid[-1]:.3g} FLOPs."
    return ReportFigure("compute", alt_text, draw, "Loss over compute", caption)


def build_law_figure(law: HyperparameterLaw, budgets: Sequence[float]) -> ReportFigure:
    """Return the optima of a hyperparameter over compute, with the law and its band."""
    flops = [group.flops for group in law.groups]
    grid = np.geomspace(min(flops), max(*flops, *budgets), _CURVE_POINTS)

    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        for group in law.groups:
            repeated = np.full(len(group.values), group.flops)
            axes.plot(repeated, group.values, "o", color=MUTED, markersize=_MARKER_SIZE)
        found = law.bracketed
        best = [group.optimum.rate for group in found]
        axes.plot([g.flops for g in found], best, "*", color=INK, markersize=7, label="optima")
        if not law.reason:
            _draw_band(axes, grid, [law.predict(float(at)) for at in grid], "a C^b")
            axes.axvline(max(flops), color=MUTED, linestyle="dashed", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylabel(law.name)
        _format_log_axis(axes, "FLOPs")
        axes.legend(fontsize=8)
        return figure

    lines = [f"{group.flops:.3g} FLOPs: {group.optimum.rate:.3g}" for group in law.bracketed]
    caption = (
        f"Dots: trained values. Stars: minima of parabolas. Band: {CONFIDENCE:.0%} interval of the "
        "law. Dashed: largest fitted compute."
    )
    alt_text = f"Best {law.name} over compute; optima: {'; '.join(lines) or 'none'}."
    name = law.name.replace(" ", "_")
    return ReportFigure(name, alt_text, draw, f"Best {law.name} over compute", caption)


def build_grid(analysis: ScalingAnalysis, law: ComputeLaw) -> Array:
    """Return the compute at which the law of compute is drawn."""
    end = max(*analysis.budgets, float(law.flops.max()))
    return np.geomspace(law.flops.min(), end, _CURVE_POINTS)


def _draw_band(axes: Axes, grid: Array, losses: Sequence[Interval], label: str) -> None:
    axes.plot(grid, [one.value for one in losses], color=SERIES[1], label=label)
    low, high = [one.low for one in losses], [one.high for one in losses]
    axes.fill_between(grid, low, high, color=SERIES[1], alpha=0.2, linewidth=0)


def _format_log_axis(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=8))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e+", "e"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)


def _build_fit_rows(fit: ScalingFit) -> list[list[object]]:
    points = fit.points
    predicted = fit.law.predict(points.inputs)
    columns: dict[str, Sequence[object]] = {
        "point": points.names,
        "parameters": points.parameters.tolist(),
        "tokens": points.tokens.tolist(),
        "flops": points.flops.tolist(),
        "loss": points.losses.tolist(),
        "predicted": predicted.tolist(),
        "log_residual": fit.residuals.tolist(),
        "influence": fit.influences.tolist(),
    }
    if points.epochs is not None:
        columns["epochs"] = points.epochs.tolist()
    return [[*columns], *map(list, zip(*columns.values(), strict=True))]


def _build_held_out_rows(analysis: ScalingAnalysis, points: ScalingPoints) -> list[list[object]]:
    rows: list[list[object]] = [
        ["point", "parameters", "tokens", "flops", "loss", "predicted", "low", "high"]
    ]
    for i, one in enumerate(analysis.held_out_predictions):
        measured = float(points.flops[i]), float(points.losses[i])
        interval = one.run.value, one.run.low, one.run.high
        rows.append([points.names[i], one.parameters, one.tokens, *measured, *interval])
    return rows


def _build_isoflop_rows(analysis: ScalingAnalysis) -> list[list[object]]:
    points = analysis.fit.points
    header: list[object] = [
        "budget_flops",
        "point",
        "parameters",
        "loss",
        "parabola",
        "best_parameters",
    ]
    rows: list[list[object]] = [header]
    for curve in analysis.curves:
        values = curve.predict(points.parameters[curve.indices])
        for index, value in zip(curve.indices, values, strict=True):
            cells = points.parameters[index], points.losses[index], value, curve.parameters.value
            rows.append([curve.flops, points.names[index], *map(float, cells)])
    return rows


def _build_compute_rows(law: ComputeLaw, grid: Array) -> list[list[object]]:
    rows: list[list[object]] = [["flops", "loss", "low", "high"]]
    for flops, one in zip(grid.tolist(), law.predict(grid), strict=True):
        rows.append([flops, one.value, one.low, one.high])
    return rows


def _build_law_rows(law: HyperparameterLaw) -> list[list[object]]:
    header = ["flops", "parameters", "tokens", "value", "loss", "best", "low", "high", "warning"]
    rows: list[list[object]] = [[*header]]
    for group in law.groups:
        optimum = group.optimum
        ends = (optimum.rate, optimum.low, optimum.high, group.reason)
        for value, loss in zip(group.values.tolist(), group.losses.tolist(), strict=True):
            rows.append([group.flops, group.parameters, group.tokens, value, loss, *ends])
    return rows
