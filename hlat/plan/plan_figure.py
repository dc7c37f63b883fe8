"""Waterfall charts of a plan, and planned and measured memory and step time of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.figures.report_figure import INK, MUTED, SERIES, ReportFigure
from hlat.plan.forecast import RunForecast
from hlat.plan.memory_estimate import MemoryEstimate, estimate_memory
from hlat.plan.plan_text import MEMORY_LABELS, TIME_LABELS
from hlat.plan.step_time import StepTime, predict_step_time
from hlat.study.run_record import RunRecord
from hlat.tracking.text_format import format_percent, format_short

FIGURE_NAME = "plan"
"""File name without extension."""
_MEMORY_TITLE, _TIME_TITLE = "memory of the fullest device, GiB", "time of a step, s"


@dataclass(frozen=True)
class PlanComparison:
    """A planned and measured quantity, with its unit in the name and a remark.

    `planned` contains the terms, and is empty if the planner cannot predict it; `measured` is NaN
    if it was not measured.
    """

    name: str
    planned: dict[str, float]
    measured: float
    note: str


def build_plan_figure(config: Config, plan: RunForecast) -> ReportFigure:
    """Return a figure of the memory and, if it is known, the step time of a plan."""
    charts = [(_MEMORY_TITLE, _label_memory_gib(plan.memory))]
    if plan.throughput is not None:
        charts.append((_TIME_TITLE, _label_seconds(plan.throughput.step)))

    def draw() -> Figure:
        figure, axes = _draw_waterfalls(charts, (6.4, 1.4, 0.27))
        capacity = plan.device_memory_bytes / 2**30
        _draw_reference_line(axes[0], capacity, f"device memory {capacity:,.1f}")
        return figure

    return ReportFigure(FIGURE_NAME, _format_plan_alt_text(config, plan), draw)


def compare_with_plan(record: RunRecord) -> list[PlanComparison]:
    """Return planned and measured memory and step time; raise ConfigError if there is no plan."""
    config = record.valid_config
    memory = _label_memory_gib(estimate_memory(config))
    peak = max(record.get_finite_values("memory_bytes").tolist(), default=math.nan) / 2**30
    wait = record.compute_median("data_wait_seconds")
    note = f"Measured: the median, including {format_short(wait)} s of waiting for data."
    time: dict[str, float] = {}
    try:
        time = _label_seconds(predict_step_time(config))
    except ConfigError as error:
        note = f"The step time is not planned: {'; '.join(error.problems)}."
    return [
        PlanComparison(_MEMORY_TITLE, memory, peak, "Measured: the peak memory of rank 0."),
        PlanComparison(_TIME_TITLE, time, record.compute_median("step_seconds"), note),
    ]


def try_compare_with_plan(record: RunRecord) -> tuple[list[PlanComparison], str]:
    """Return the comparison, or the reason why the run cannot be planned; both may be empty."""
    if not record.config or not record.metrics:
        return [], ""
    try:
        return compare_with_plan(record), ""
    except ConfigError as error:
        return [], "; ".join(error.problems)


def build_plan_comparison_figure(comparisons: list[PlanComparison]) -> ReportFigure:
    """Return a figure of the planned terms, with the measured values as lines."""
    planned = [comparison for comparison in comparisons if comparison.planned]
    charts = [(comparison.name, comparison.planned) for comparison in planned]

    def draw() -> Figure:
        figure, panels = _draw_waterfalls(charts, (6.0, 0.6 * len(charts), 0.25))
        for axes, comparison in zip(panels, planned, strict=True):
            if not math.isnan(comparison.measured):
                label = f"measured {format_short(comparison.measured)}"
                _draw_reference_line(axes, comparison.measured, label)
        return figure

    alt_text = " ".join(map(_format_comparison_alt_text, planned))
    caption = " ".join(comparison.note for comparison in comparisons)
    return ReportFigure(FIGURE_NAME, alt_text, draw, caption=caption)


def build_plan_comparison_table(comparisons: list[PlanComparison]) -> list[tuple[str, ...]]:
    """Return name, term, planned and measured value, and error of the plan."""
    rows: list[tuple[str, ...]] = []
    for one in comparisons:
        terms = one.planned.items()
        rows += [(one.name, label, format_short(value), "", "") for label, value in terms if value]
        total = _sum_terms(one)
        error = total / one.measured - 1 if one.measured else math.nan
        values = format_short(total), format_short(one.measured), format_percent(100 * error)
        rows.append((one.name, "all", *values))
    return rows


def _draw_waterfalls(
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


def _draw_reference_line(axes: Axes, value: float, label: str) -> None:
    """Draw a vertical line at `value`; far outside the axis, only its label."""
    right = axes.get_xlim()[1]
    if value > 3 * right:
        axes.set_xlabel(label)
        return
    axes.set_xlim(0, max(right, value * 1.1))
    axes.axvline(value, color=MUTED, linestyle="dashed", linewidth=1)
    transform = axes.get_xaxis_transform()
    axes.text(value, 0.92, f"{label} ", transform=transform, ha="right", fontsize=8)


def _format_plan_alt_text(config: Config, plan: RunForecast) -> str:
    step = "" if plan.throughput is None else f"; {plan.throughput.step.total:.3g} s per step"
    return (
        f"{config.model.name} on {config.hardware.nodes} of {config.hardware.name}: "
        f"{plan.memory.total / 2**30:.2f} GiB of {plan.device_memory_bytes / 2**30:.2f}, which "
        f"{'fits' if plan.fits else 'does not fit'}{step}."
    )


def _format_comparison_alt_text(comparison: PlanComparison) -> str:
    name = f"{comparison.name[0].upper()}{comparison.name[1:]}"
    planned, measured = format_short(_sum_terms(comparison)), format_short(comparison.measured)
    return f"{name}: planned {planned}, measured {measured}."


def _sum_terms(comparison: PlanComparison) -> float:
    return sum(comparison.planned.values()) if comparison.planned else math.nan


def _label_memory_gib(memory: MemoryEstimate) -> dict[str, float]:
    return {MEMORY_LABELS[name]: size / 2**30 for name, size in asdict(memory).items()}


def _label_seconds(step: StepTime) -> dict[str, float]:
    return {label: getattr(step, name) for name, label in TIME_LABELS.items()}
