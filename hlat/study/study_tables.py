"""Tables of a study, for a terminal, pages and W&B."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

from hlat.config.study import StudyConfig
from hlat.study.difference_format import format_interval, format_metric, format_p_value
from hlat.study.factor_effects import FactorEffect
from hlat.study.lr_tuning import TUNING_CAPTION, build_tuning_table
from hlat.study.metric_reliability import (
    analyze_reliability,
    build_reliability_table,
    format_reliability_caption,
)
from hlat.study.paired_test import PairedDifference, compute_mean_interval
from hlat.study.rate_comparison import DIVERGENCE_CAPTION, build_divergence_table
from hlat.study.stability_table import (
    STABILITY_CAPTION,
    build_stability_table,
    has_diagnostics,
)
from hlat.study.study_analysis import Comparison, Point, Verdict, format_point, format_verdict
from hlat.study.study_result import StudyResult
from hlat.tracking.text_format import format_markdown_table, format_table
from hlat.tracking.tracking_services import read_wandb_run_id
from hlat.tracking.wandb_report import StudyReport

Table = tuple[list[str], list[list[str]]]
"""Headers and rows."""
_NO_BASELINE = "no point has a baseline; set study.baseline"
EFFECTS_CAPTION = (
    "Effects, paired by seed; p is corrected for all comparisons (Holm), each interval is not"
)
FACTORS_CAPTION = "Mean effects over the other factors, and dependence of effects on them"
POINTS_CAPTION = "Points; compare them by their effects, because runs of a seed are paired"


def build_point_table(result: StudyResult) -> Table:
    """Return the headers, and a row for each point: runs, mean, interval and noise."""
    confidence = f"{100 * (1 - result.design.alpha):.3g}% interval"
    headers = ["Point", "Finished", "Diverged", "Mean", confidence, "SD over seeds"]
    rows = []
    stops = _format_stops(result)
    for point, one in result.points.items():
        values = list(one.runs.values.values())
        mean, low, high = compute_mean_interval(values, 1 - result.design.alpha)
        rows.append(
            [
                format_point(point),
                f"{len(values)} of {len(one.run_names)}{stops.get(point, '')}",
                str(len(one.runs.diverged)),
                format_metric(mean),
                format_interval(low, high),
                format_metric(_compute_std(values)),
                format_metric(one.noise),
            ]
        )
    return [*headers, "SD over the last evaluations"], rows


def build_effect_table(comparisons: Sequence[Comparison], design: StudyConfig) -> Table:
    """Return the headers, and a row for each comparison: difference, test and verdict."""
    rows = [
        [
            *_format_effect(one.label, one.difference, one.p_value),
            format_metric(one.difference.effect_size, signed=True, decimals=2),
            format_verdict(one, design),
        ]
        for one in comparisons
    ]
    return [*_list_effect_headers(design), "Hedges' g", "Verdict"], rows


def build_factor_table(effects: Sequence[FactorEffect], design: StudyConfig) -> Table:
    """Return the headers, and a row for each mean effect and interaction."""
    rows = [_format_effect(one.label, one.difference, one.p_value) for one in effects]
    return _list_effect_headers(design), rows


def build_result_tables(result: StudyResult) -> dict[str, Table]:
    """Return all tables of a study except that of the points, by caption."""
    groups = [
        (result.metric_label, result.design, result.comparisons, result.factor_effects),
        *((one.label, one.design, one.comparisons, one.effects) for one in result.criteria),
    ]
    tables: dict[str, Table] = {}
    for label, design, comparisons, effects in groups:
        if comparisons:
            tables[f"{EFFECTS_CAPTION}: {label}"] = build_effect_table(comparisons, design)
        if effects:
            tables[f"{FACTORS_CAPTION}: {label}"] = build_factor_table(effects, design)
    if result.divergence:
        tables[DIVERGENCE_CAPTION] = build_divergence_table(result.divergence)
    if result.tunings:
        tables[TUNING_CAPTION] = build_tuning_table(result.tunings)
    summaries = {point: one.summaries for point, one in result.points.items()}
    if has_diagnostics(summaries):
        tables[STABILITY_CAPTION] = build_stability_table(summaries)
    trajectories = [one.trajectories for one in result.points.values()]
    if reliabilities := analyze_reliability(trajectories, result.design):
        caption = format_reliability_caption(reliabilities, result.design)
        tables[caption] = build_reliability_table(reliabilities)
    return tables


def format_study(result: StudyResult) -> list[str]:
    """Return the tables, and the question with its answer, for a terminal."""
    lines = [f"\npoints: {result.metric_label}", *format_table(*build_point_table(result))]
    for caption, table in build_result_tables(result).items():
        lines += [f"\n{caption}:", *format_table(*table)]
    if not result.verdicts:
        return [*lines, f"\n{_NO_BASELINE}"]
    return [*lines, f"\n{_format_title(result)}", *result.verdicts]


def build_study_report(result: StudyResult, run_dirs: Sequence[Path]) -> StudyReport:
    """Return the same tables and verdicts for a report in W&B."""
    factors = [key for key, _ in next(iter(result.points))]
    run_ids = [*filter(None, map(read_wandb_run_id, run_dirs))]
    tables = build_result_tables(result)
    tables[POINTS_CAPTION] = build_point_table(result)
    return StudyReport(
        title=result.design.question or f"Study of {', '.join(factors)}",
        verdicts=result.verdicts or [_NO_BASELINE],
        tables={title: "\n".join(format_markdown_table(*table)) for title, table in tables.items()},
        metric=result.design.metric,
        factors=factors,
        run_ids=run_ids,
    )


def _format_title(result: StudyResult) -> str:
    question = result.design.question
    return f"answer to: {question}" if question else "verdicts:"


def _list_effect_headers(design: StudyConfig) -> list[str]:
    confidence = f"{100 * (1 - design.alpha):.3g}% interval"
    return ["Comparison", "Seeds", "Difference", "SE of the text", confidence, "p (Holm)"]


def _format_effect(label: str, difference: PairedDifference, p_value: float) -> list[str]:
    return [
        label,
        str(difference.num_pairs),
        format_metric(difference.mean, signed=True),
        format_metric(difference.evaluation_error),
        format_interval(difference.low, difference.high),
        format_p_value(p_value),
    ]


def _format_stops(result: StudyResult) -> dict[Point, str]:
    """Return the points that got fewer seeds than others because they are worse, with a text."""
    num_seeds = max((len(one.run_names) for one in result.points.values()), default=0)
    num_seeds = max(num_seeds, result.num_planned)
    return {
        one.point: f", stopped; {num_seeds} planned"
        for one in result.comparisons
        if result.design.stop_worse and one.verdict is Verdict.worse
        if len(result.points[one.point].run_names) < num_seeds
    }


def _compute_std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan
