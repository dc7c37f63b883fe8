"""Difference to the baseline in the source of a study's metric, over that in each other source."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hlat.figures.report_figure import FIGURE_SIZE, MUTED, ReportFigure, get_line_style
from hlat.study.difference_format import format_interval, format_metric
from hlat.study.heldout_clusters import HELDOUT_METRIC
from hlat.study.paired_test import PairedDifference, PointRuns, compare_paired
from hlat.study.study_analysis import format_point
from hlat.study.study_result import StudyResult


@dataclass(frozen=True)
class SourceDifferences:
    """Differences of a point to its baseline by source."""

    label: str
    by_source: dict[str, PairedDifference]


def build_tradeoff_figure(result: StudyResult) -> ReportFigure | None:
    """Return a panel for each other source; None if the metric is not that of one source."""
    prefix, _, source = result.design.metric.partition(".")
    points = _compare_sources(result)
    if prefix != HELDOUT_METRIC or not source or not points:
        return None
    others = [name for name in points[0].by_source if name != source]
    if not others or any(source not in one.by_source for one in points):
        return None
    title = f"Bits per byte of {source} over those of other sources, less the baseline"

    def draw() -> Figure:
        figure = Figure(figsize=(FIGURE_SIZE[0] * 1.2, FIGURE_SIZE[1]), layout="constrained")
        grid = figure.subplots(1, len(others), sharey=True, squeeze=False)
        for axes, other in zip(grid[0], others, strict=True):
            _draw_panel(axes, points, other, source)
        grid[0][0].set_ylabel(f"{source}, less the baseline")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", fontsize=8, ncols=2)
        return figure

    texts = [f"{one.label}: {_format_differences(one)}" for one in points]
    caption = (
        "Bits per byte: mean over seeds, paired by seed, with its interval. The baseline is at "
        "the dotted lines; lower and further left is better."
    )
    return ReportFigure("tradeoff", f"{title}; {'; '.join(texts)}.", draw, title, caption)


def _compare_sources(result: StudyResult) -> list[SourceDifferences]:
    """Return the differences of each compared point in all sources."""
    found = []
    for one in result.comparisons:
        ours, baseline = result.points[one.point].sources, result.points[one.baseline].sources
        differences = {
            source: compare_paired(
                PointRuns(ours[source]),
                PointRuns(baseline[source]),
                confidence=1 - result.design.alpha,
            )
            for source in ours
            if source in baseline
        }
        found.append(SourceDifferences(format_point(one.point), differences))
    return found


def _format_differences(point: SourceDifferences) -> str:
    return ", ".join(
        f"{name} {format_metric(one.mean, signed=True)} ({format_interval(one.low, one.high)})"
        for name, one in point.by_source.items()
    )


def _draw_panel(axes: Axes, points: Sequence[SourceDifferences], other: str, source: str) -> None:
    axes.axvline(0, color=MUTED, linewidth=0.8, linestyle=":")
    axes.axhline(0, color=MUTED, linewidth=0.8, linestyle=":")
    for index, one in enumerate(points):
        x, y = one.by_source[other], one.by_source[source]
        colour, _ = get_line_style(index, one.label)
        axes.errorbar(
            x.mean,
            y.mean,
            xerr=[[x.mean - x.low], [x.high - x.mean]],
            yerr=[[y.mean - y.low], [y.high - y.mean]],
            fmt="o",
            color=colour,
            label=one.label,
        )
    axes.set_xlabel(f"{other}, less the baseline")
    axes.xaxis.set_major_locator(MaxNLocator(4))
