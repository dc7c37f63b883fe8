"""Study of several runs: points, comparisons with their baselines, and verdicts.

`build_study_result` is the interface for tables, pages and figures.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.study import Direction, StudyConfig
from hlat.study.factor_effects import FactorEffect, analyze_factor_effects
from hlat.study.heldout_clusters import compute_influences, find_text_problem
from hlat.study.lr_tuning import (
    TUNING_CAPTION,
    LrTuning,
    Transfer,
    analyze_transfer,
    analyze_tunings,
    build_tuning_table,
    format_transfer,
    format_tuning,
    merge_grids,
)
from hlat.study.paired_test import PairedDifference, PointRuns, compute_mean_interval
from hlat.study.power import estimate_checkpoint_noise, pool_noise
from hlat.study.run_comparison import drop_copies, find_config_differences
from hlat.study.run_record import Row, RunRecord, get_number, get_numbers
from hlat.study.study_analysis import (
    Comparison,
    Point,
    Verdict,
    analyze_study,
    format_answer,
    format_point,
    format_verdict,
)
from hlat.study.summary_tables import get_run_state
from hlat.tracking.heldout_rows import get_loop_row
from hlat.tracking.summary_metrics import compute_summary_metrics
from hlat.tracking.text_format import (
    UNKNOWN,
    format_markdown_table,
    format_setting,
    format_short,
    format_table,
)
from hlat.tracking.tracking_services import read_wandb_run_id
from hlat.tracking.wandb_report import StudyReport

SEED_KEY = "run.seed"
_IGNORED_PREFIX = "tracking."
"""Prefix of settings that runs of several studies differ in, without effect on the metric."""
_START_KEY = "checkpoint.start_from"
_EVALUATED_METRICS = {"heldout_bits_per_byte": "bits_per_byte", "scores": "scores"}
"""Prefixes of metrics by source or task, and their fields in events."""
_INTERVAL_LIMIT = 1000
_NO_BASELINE = "no point has a baseline; set study.baseline"
EFFECTS_CAPTION = (
    "Effects, paired by seed; p is corrected for all comparisons (Holm), each interval is not"
)
FACTORS_CAPTION = "Mean effects over the other factors, and dependence of effects on them"
POINTS_CAPTION = "Points; compare them by their effects, because runs of a seed are paired"


@dataclass(frozen=True)
class StudyPoint:
    """Runs of a point with its noise: over the last evaluations of a run, pooled over its runs."""

    runs: PointRuns
    run_names: tuple[str, ...]
    noise: float


@dataclass(frozen=True)
class StudyResult:
    """Points of a study in the order of the runs, and each point with its baseline.

    A study with a grid of learning rates has their optima in place of comparisons.

    `num_planned` is the number of seeds of the sweep; 0: unknown. `text_problem` is a sentence if
    the runs did not evaluate the same held-out text.
    """

    design: StudyConfig
    points: dict[Point, StudyPoint]
    comparisons: list[Comparison]
    factor_effects: list[FactorEffect] = field(default_factory=list)
    num_planned: int = 0
    text_problem: str = ""
    tunings: list[LrTuning] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    @cached_property
    def verdicts(self) -> list[str]:
        """One sentence per comparison: what is compared, the verdict, and its numbers.

        If the runs did not evaluate the same text, the first line says so.
        """
        return [
            *([f"WARNING: {self.text_problem}"] if self.text_problem else []),
            *self._list_verdicts(),
        ]

    def _list_verdicts(self) -> list[str]:
        if self.tunings:
            return [
                *(format_transfer(one, self.design) for one in self.transfers),
                *(format_tuning(one, self.design) for one in self.tunings),
            ]
        return [
            f"{format_answer(one, self.design)} ({_format_numbers(one)})"
            for one in self.comparisons
        ]

    @property
    def metric_label(self) -> str:
        """Metric with its direction."""
        better = "higher" if self.design.direction is Direction.maximize else "lower"
        return f"{self.design.metric}, {better} is better"


def build_study_result(records: Sequence[RunRecord], num_planned: int = 0) -> StudyResult | None:
    """Return the study of several runs; None if they have neither a design nor several seeds.

    `num_planned` is the number of seeds of a study that has not ended.
    """
    records = drop_copies(records)
    axes = find_config_differences(records)
    axes = _drop_implied_start(
        {key: axes[key] for key in axes if not key.startswith(_IGNORED_PREFIX)}
    )
    seeds = axes.pop(SEED_KEY, None)
    design = _find_design(records, axes)
    has_design = bool(design.baseline) or design.lr_grid.factor is not None
    if not axes or (seeds is None and not has_design):
        return None
    members: dict[Point, dict[str, RunRecord]] = {}
    for i, record in enumerate(records):
        point = tuple((key, values[i]) for key, values in axes.items())
        runs = members.setdefault(point, {})
        runs[find_unused_seed(seeds[i] if seeds else "", runs)] = record
    influences = compute_influences(records, design.metric)
    by_run = {id(record): each for record, each in zip(records, influences, strict=True)}
    points = {point: _build_point(runs, design.metric, by_run) for point, runs in members.items()}
    outcomes = {point: one.runs for point, one in points.items()}
    problem = find_text_problem(records, design.metric)
    scales = {point: _get_scale(runs, design) for point, runs in members.items()}
    if tunings := analyze_tunings(outcomes, design, scales):
        transfers = analyze_transfer(tunings, design)
        return StudyResult(design, points, [], [], num_planned, problem, tunings, transfers)
    comparisons = analyze_study(outcomes, design, num_planned)
    factor_effects = analyze_factor_effects(outcomes, design)
    return StudyResult(design, points, comparisons, factor_effects, num_planned, problem)


def get_metric(record: RunRecord, metric: str) -> float:
    """Return the metric of a run: of its summary, or of its last evaluation; NaN if missing."""
    prefix, _, name = metric.partition(".")
    if name and prefix in _EVALUATED_METRICS:
        values = _list_evaluated_values(record, metric)
        return values[-1] if values else math.nan
    return compute_summary_metrics(record.metrics, record.events).get(metric, math.nan)


def build_point_table(result: StudyResult) -> tuple[list[str], list[list[str]]]:
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


def build_effect_table(result: StudyResult) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and a row for each comparison: difference, test and verdict."""
    rows = [
        [
            *_format_effect(one.label, one.difference, one.p_value),
            format_metric(one.difference.effect_size, signed=True, decimals=2),
            format_verdict(one, result.design),
        ]
        for one in result.comparisons
    ]
    return [*_list_effect_headers(result), "Hedges' g", "Verdict"], rows


def build_factor_table(result: StudyResult) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and a row for each mean effect and interaction."""
    rows = [_format_effect(one.label, one.difference, one.p_value) for one in result.factor_effects]
    return _list_effect_headers(result), rows


def format_study(result: StudyResult) -> list[str]:
    """Return the tables, and the question with its answer, for a terminal."""
    lines = [f"\npoints: {result.metric_label}", *format_table(*build_point_table(result))]
    if result.tunings:
        lines += [f"\n{TUNING_CAPTION}:", *format_table(*build_tuning_table(result.tunings))]
        return [*lines, f"\n{_format_title(result)}", *result.verdicts]
    if not result.comparisons:
        return [*lines, f"\n{_NO_BASELINE}"]
    lines += [f"\n{EFFECTS_CAPTION}:", *format_table(*build_effect_table(result))]
    if result.factor_effects:
        lines += [f"\n{FACTORS_CAPTION}:", *format_table(*build_factor_table(result))]
    return [*lines, f"\n{_format_title(result)}", *result.verdicts]


def build_study_report(result: StudyResult, run_dirs: Sequence[Path]) -> StudyReport:
    """Return the same tables and verdicts for a report in W&B."""
    factors = [key for key, _ in next(iter(result.points))]
    run_ids = [*filter(None, map(read_wandb_run_id, run_dirs))]
    if result.tunings:
        tables = {TUNING_CAPTION: build_tuning_table(result.tunings)}
    else:
        tables = {f"{EFFECTS_CAPTION}: {result.metric_label}": build_effect_table(result)}
    if result.factor_effects:
        tables[FACTORS_CAPTION] = build_factor_table(result)
    tables[POINTS_CAPTION] = build_point_table(result)
    return StudyReport(
        title=result.design.question or f"Study of {', '.join(factors)}",
        verdicts=result.verdicts or [_NO_BASELINE],
        tables={title: "\n".join(format_markdown_table(*table)) for title, table in tables.items()},
        metric=result.design.metric,
        factors=factors,
        run_ids=run_ids,
    )


def format_metric(value: float, signed: bool = False, decimals: int = 4) -> str:
    """Return a value of a metric or a difference."""
    if not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= _INTERVAL_LIMIT:
        return ("+" if signed and value > 0 else "") + format_short(value)
    return f"{value:+.{decimals}f}" if signed else f"{value:.{decimals}f}"


def format_interval(low: float, high: float) -> str:
    """Return a confidence interval."""
    return UNKNOWN if math.isnan(low) else f"{format_metric(low)} to {format_metric(high)}"


def format_p_value(value: float) -> str:
    """Return a p value with two digits."""
    if math.isnan(value):
        return UNKNOWN
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def _format_title(result: StudyResult) -> str:
    question = result.design.question
    return f"answer to: {question}" if question else "verdicts:"


def _list_effect_headers(result: StudyResult) -> list[str]:
    confidence = f"{100 * (1 - result.design.alpha):.3g}% interval"
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


def _drop_implied_start(axes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the axes without the checkpoint of the start, if the others identify each run.

    Branches of several seeds start from the trunk of their seed, which is no factor.
    """
    others = {key: values for key, values in axes.items() if key != _START_KEY}
    points = [*zip(*others.values(), strict=True)]
    return others if len({*points}) == len(points) > 0 else axes


def _find_design(records: Sequence[RunRecord], axes: dict[str, list[str]]) -> StudyConfig:
    """Return the design that most runs record, with the names of the axes in its baseline.

    A run may have been trained for another study, whose baseline has other factors.
    """
    found: dict[str, StudyConfig] = {}
    designs = [record.study_design for record in records]
    for design in designs:
        baseline = _name_baseline(design.baseline, axes)
        if len(baseline) == len(design.baseline):
            found.setdefault(repr(design), replace(design, baseline=baseline))
    counts = Counter(map(repr, designs))
    if not found:
        return StudyConfig()
    design = found[max(found, key=lambda text: counts[text])]
    return replace(design, lr_grid=merge_grids(designs, design))


def _get_scale(runs: Mapping[str, RunRecord], design: StudyConfig) -> float:
    """Return the value of study.lr_grid.transfer_over of a point; NaN if it is no number."""
    first = next(iter(runs.values()))
    return get_number(first.flat_config, design.lr_grid.transfer_over or "")


def _format_numbers(comparison: Comparison) -> str:
    difference = comparison.difference
    return (
        f"difference {format_metric(difference.mean, signed=True)}, interval "
        f"{format_interval(difference.low, difference.high)}, "
        f"p {format_p_value(comparison.p_value)}"
    )


def _build_point(
    runs: dict[str, RunRecord], metric: str, influences: dict[int, NDArray[np.float64] | None]
) -> StudyPoint:
    states = {seed: get_run_state(record) for seed, record in runs.items()}
    values = {seed: get_metric(runs[seed], metric) for seed in runs if states[seed] == "finish"}
    outcomes = PointRuns(
        {seed: value for seed, value in values.items() if math.isfinite(value)},
        frozenset(seed for seed, state in states.items() if state == "diverge"),
        {seed: found for seed in runs if (found := influences[id(runs[seed])]) is not None},
    )
    noises = [
        estimate_checkpoint_noise(_list_evaluated_values(runs[seed], metric, get_loop_row))
        for seed in outcomes.values
    ]
    names = tuple(record.name for record in runs.values())
    return StudyPoint(outcomes, names, pool_noise(noises))


def _list_evaluated_values(
    record: RunRecord, metric: str, select_row: Callable[[Row], Row] = lambda row: row
) -> list[float]:
    """Return the values of a metric at the evaluations of a run; empty for other metrics."""
    prefix, _, name = metric.partition(".")
    field = _EVALUATED_METRICS.get(prefix)
    if field is None:
        return []
    rows = record.scores if field == "scores" else record.evaluations
    values = [
        get_number(get_numbers(select_row(row), field), name or "mean") for row in rows.values()
    ]
    return [value for value in values if math.isfinite(value)]


def _compute_std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan


def _name_baseline(baseline: dict[str, Any], axes: dict[str, list[str]]) -> dict[str, Any]:
    """Return the baseline with the keys and texts of the axes; a group has the key of its name."""
    named = {}
    for key, value in baseline.items():
        axis = key if key in axes else f"{key}.name"
        if axis in axes:
            named[axis] = format_setting(value)
    return named


def find_unused_seed(seed: str, runs: Mapping[str, Any]) -> str:
    """Return the seed; a second run with the same one, as of other code, is not paired."""
    return seed if seed not in runs else f"{seed}#{len(runs)}"
