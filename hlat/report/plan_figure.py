"""Waterfall charts of a plan: memory of the fullest device and step time, by term."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hlat.config.run import Config
from hlat.plan.forecast import RunForecast
from hlat.report.figures import INK, MUTED, SERIES, ReportFigure
from hlat.report.plan_text import MEMORY_LABELS, TIME_LABELS

MEMORY_TITLE, TIME_TITLE = "memory of the fullest device, GiB", "time of a step, s"


def build_plan_figure(config: Config, plan: RunForecast) -> ReportFigure:
    """Return a figure of the memory and, if it is known, the step time of a plan."""
    memory = {MEMORY_LABELS[name]: size / 2**30 for name, size in asdict(plan.memory).items()}
    charts = [(MEMORY_TITLE, memory)]
    if plan.throughput is not None:
        step = asdict(plan.throughput.step)
        charts.append(
            (TIME_TITLE, {TIME_LABELS[n]: s for n, s in step.items() if n in TIME_LABELS})
        )

    def draw() -> Figure:
        figure, axes = draw_waterfalls(charts, (6.4, 1.4, 0.27))
        capacity = plan.device_memory_bytes / 2**30
        draw_reference_line(axes[0], capacity, f"device memory {capacity:,.1f}")
        return figure

    return ReportFigure("plan", _format_alt_text(config, plan), draw)


def draw_waterfalls(
    charts: Sequence[tuple[str, Mapping[str, float]]],
    size: tuple[float, float, float],
) -> tuple[Figure, list[Axes]]:
    """Draw waterfall charts below each other.

    Args:
        charts: Title and terms of each chart; a term starts where the previous one ends.
        size: Width, height without rows, and height per row, in inches.
    """
    charts = [(title, {k: v for k, v in terms.items() if v > 0}) for title, terms in charts]
    rows = [len(terms) for _, terms in charts]
    width, height, row_height = size
    figure = Figure(figsize=(width, height + row_height * sum(rows)), layout="constrained")
    panels = [*figure.subplots(len(charts), 1, height_ratios=rows, squeeze=False)[:, 0]]
    for axes, (title, terms), colour in zip(panels, charts, SERIES, strict=False):
        total, left = sum(terms.values()), 0.0
        for row, value in enumerate(terms.values()):
            axes.barh(row, value, left=left, color=colour, height=0.7)
            left += value
            axes.text(left + total / 100, row, f"{value:.3g}", va="center", fontsize=8)
        axes.set_yticks(range(len(terms)), list(terms))
        axes.invert_yaxis()
        axes.set_xlim(0, total * 1.1)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(axis="y", visible=False)
        axes.set_axisbelow(True)
        axes.set_title(f"{title}: {total:.4g} in total", loc="left", fontsize=10)
    return figure, panels


def draw_reference_line(axes: Axes, value: float, label: str) -> None:
    """Draw a vertical line at `value`; far outside the axis, only its label."""
    right = axes.get_xlim()[1]
    if value > 3 * right:
        axes.set_xlabel(label)
        return
    axes.set_xlim(0, max(right, value * 1.1))
    axes.axvline(value, color=MUTED, linestyle="dashed", linewidth=1)
    transform = axes.get_xaxis_transform()
    axes.text(value, 0.92, f"{label} ", transform=transform, ha="right", fontsize=8)


def _format_alt_text(config: Config, plan: RunForecast) -> str:
    step = "" if plan.throughput is None else f"; {plan.throughput.step.total:.3g} s per step"
    return (
        f"{config.model.name} on {config.hardware.nodes} of {config.hardware.name}: "
        f"{plan.memory.total / 2**30:.2f} GiB of {plan.device_memory_bytes / 2**30:.2f}, which "
        f"{'fits' if plan.fits else 'does not fit'}{step}."
    )
