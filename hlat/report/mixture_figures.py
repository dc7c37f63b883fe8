"""Page of a mixture study: tables, and the mixtures in parallel coordinates as SVG and CSV."""

import csv
import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hlat.figures.page_templates import render_page
from hlat.figures.report_figure import FIGURE_SIZE, INK, MUTED, SERIES, ReportFigure
from hlat.report.report_writer import TEMPLATES, detect_columns, write_figures
from hlat.storage.durable_files import replace_file
from hlat.study.mixture_analysis import MixtureAnalysis
from hlat.study.mixture_text import (
    build_tables,
    format_gain,
    format_headline,
    format_start,
    format_target,
)

_NAME = "mixtures"
_MAX_LABEL = 12


def write_mixture_page(analysis: MixtureAnalysis, output_dir: Path) -> list[str]:
    """Write the page, the figure and its numbers; return the names of the files."""
    figure = build_mixture_figure(analysis)
    write_figures(output_dir, [figure])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_build_rows(analysis))
    page = render_page(
        TEMPLATES / "mixture.html.j2",
        title="Mixture study",
        name=analysis.points.location,
        facts=[],
        lines=[
            format_headline(analysis),
            *analysis.notes,
            *format_start(analysis),
            format_gain(analysis),
        ],
        warnings=analysis.warnings,
        tables={
            caption: (detect_columns(headers, rows), rows)
            for caption, (headers, rows) in build_tables(analysis).items()
        },
        figures=[figure],
    )
    replace_file(output_dir / f"{_NAME}.csv", text.getvalue().encode())
    replace_file(output_dir / "mixture.html", page.encode())
    return ["mixture.html", f"{_NAME}.svg", f"{_NAME}.png", f"{_NAME}.csv"]


def build_mixture_figure(analysis: MixtureAnalysis) -> ReportFigure:
    """Return the weights of all mixtures, with the best quarter, the base and the proposal."""
    points = analysis.points
    is_best = _find_best(analysis)

    def draw() -> Figure:
        width = max(FIGURE_SIZE[0], 0.6 * len(points.sources))
        figure = Figure(figsize=(width, 1.2 * FIGURE_SIZE[1]), layout="constrained")
        axes = figure.add_subplot()
        positions = np.arange(len(points.sources))
        for weights, best in zip(points.weights, is_best, strict=True):
            colour, order = (SERIES[2], 2) if best else (MUTED, 1)
            axes.plot(positions, weights, color=colour, alpha=0.5, linewidth=0.8, zorder=order)
        axes.plot(positions, points.base, color=INK, linestyle="dashed", linewidth=2, zorder=3)
        axes.plot(positions, analysis.proposal.weights, color=SERIES[1], linewidth=2.5, zorder=4)
        labels = [_shorten(name) for name in points.sources]
        rotation = 90 if len(labels) > 6 else 0
        axes.set_xticks(positions, labels, rotation=rotation)
        part = " of the last phase" if points.has_phase.any() else ""
        axes.set_ylabel(f"proportion of tokens{part}")
        axes.set_ylim(bottom=0)
        _draw_legend(figure)
        return figure

    pairs = zip(points.sources, points.base, analysis.proposal.weights, strict=True)
    changes = "; ".join(f"{name} from {base:.3f} to {new:.3f}" for name, base, new in pairs)
    return ReportFigure(
        _NAME,
        f"Weights of {len(points)} models; from base to proposal: {changes}.",
        draw,
        "Mixtures in parallel coordinates",
        f"One line per model. Best quarter: lowest {format_target(analysis)}.",
    )


def _find_best(analysis: MixtureAnalysis) -> list[bool]:
    """Return True for the quarter of the points with the lowest target [points]."""
    targets = analysis.points.losses @ analysis.target
    limit = float(np.quantile(targets, 0.25))
    return [value <= limit for value in targets.tolist()]


def _draw_legend(figure: Figure) -> None:
    lines = [
        Line2D([], [], color=SERIES[1], label="proposal"),
        Line2D([], [], color=INK, linestyle="dashed", label="base"),
        Line2D([], [], color=SERIES[2], label="best quarter"),
        Line2D([], [], color=MUTED, label="other models"),
    ]
    figure.legend(handles=lines, loc="outside upper left", ncols=4, fontsize=8)


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_LABEL else f"...{name[3 - _MAX_LABEL :]}"


def _build_rows(analysis: MixtureAnalysis) -> list[list[object]]:
    """Return the weights, losses and cross-validated targets of all points, and the proposal."""
    points, proposal = analysis.points, analysis.proposal
    weights = [f"weight.{name}" for name in points.sources]
    losses = [f"loss.{name}" for name in points.domains]
    scores = {f"predicted.{each.form.value}": each for each in analysis.scores if each.form}
    rows: list[list[object]] = [["point", *weights, "start", *losses, "target", *scores]]
    targets = points.losses @ analysis.target
    predicted = [score.predictions @ analysis.target for score in scores.values()]
    for index, name in enumerate(points.names):
        start = points.starts[index : index + 1]
        values = (points.weights[index], start, points.losses[index], targets[index : index + 1])
        cells = [value for part in values for value in part.tolist()]
        rows.append([name, *cells, *(float(column[index]) for column in predicted)])
    for name, mixture, begin, found in (
        ("base, predicted", points.base, 0.0, proposal.base_losses),
        ("proposal, predicted", proposal.weights, proposal.start, proposal.losses),
    ):
        rows.append(
            [name, *mixture.tolist(), begin, *found.tolist(), float(found @ analysis.target)]
        )
    return rows
