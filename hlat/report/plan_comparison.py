"""Planned and measured memory and step time of a run."""

import math
from dataclasses import asdict, dataclass

from matplotlib.figure import Figure

from hlat.config.config_errors import ConfigError
from hlat.config.redacted_config import parse_run_config
from hlat.plan.memory_estimate import estimate_memory
from hlat.plan.step_time import predict_step_time
from hlat.report.figures import ReportFigure
from hlat.report.plan_figure import MEMORY_TITLE, TIME_TITLE, draw_reference_line, draw_waterfalls
from hlat.report.plan_text import MEMORY_LABELS, TIME_LABELS
from hlat.report.run_record import RunRecord
from hlat.report.text_format import format_percent, format_short

FIGURE_NAME = "plan"
"""File name without extension."""


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


def compare_with_plan(record: RunRecord) -> list[PlanComparison]:
    """Return planned and measured memory and step time; raise ConfigError if there is no plan."""
    config = parse_run_config(record.config)
    terms = asdict(estimate_memory(config))
    memory = {MEMORY_LABELS[name]: size / 2**30 for name, size in terms.items()}
    peak = max(record.get_finite_values("memory_bytes").tolist(), default=math.nan) / 2**30
    wait = record.compute_median("data_wait_seconds")
    note = f"Measured: the median, including {format_short(wait)} s of waiting for data."
    time: dict[str, float] = {}
    try:
        step = asdict(predict_step_time(config))
        time = {label: step[key] for key, label in TIME_LABELS.items()}
    except ConfigError as error:
        note = f"The step time is not planned: {'; '.join(error.problems)}."
    return [
        PlanComparison(MEMORY_TITLE, memory, peak, "Measured: the peak memory of rank 0."),
        PlanComparison(TIME_TITLE, time, record.compute_median("step_seconds"), note),
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
        figure, panels = draw_waterfalls(charts, (6.0, 0.6 * len(charts), 0.25))
        for axes, comparison in zip(panels, planned, strict=True):
            if not math.isnan(comparison.measured):
                label = f"measured {format_short(comparison.measured)}"
                draw_reference_line(axes, comparison.measured, label)
        return figure

    alt_text = " ".join(map(_format_alt_text, planned))
    caption = " ".join(comparison.note for comparison in comparisons)
    return ReportFigure(FIGURE_NAME, alt_text, draw, caption=caption)


def _format_alt_text(comparison: PlanComparison) -> str:
    name = f"{comparison.name[0].upper()}{comparison.name[1:]}"
    planned, measured = format_short(_sum_terms(comparison)), format_short(comparison.measured)
    return f"{name}: planned {planned}, measured {measured}."


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


def _sum_terms(comparison: PlanComparison) -> float:
    return sum(comparison.planned.values()) if comparison.planned else math.nan
