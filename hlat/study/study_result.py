"""Study of several runs: points, comparisons with their baselines, and verdicts.

`build_study_result` is the interface for tables, pages and figures.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hlat.config.seeds import pop_seeds
from hlat.config.study import Direction, StudyConfig
from hlat.study.difference_format import format_interval, format_metric, format_p_value
from hlat.study.factor_effects import FactorEffect, analyze_factor_effects
from hlat.study.heldout_clusters import compute_influences, find_text_problem
from hlat.study.lr_tuning import (
    LrTuning,
    Transfer,
    analyze_transfer,
    analyze_tunings,
    format_transfer,
    format_tuning,
    merge_grids,
)
from hlat.study.rate_comparison import (
    DivergenceComparison,
    RateCriterion,
    analyze_rate_criteria,
    compare_divergence,
    compares_over_rates,
    format_divergence,
)
from hlat.study.run_comparison import drop_copies, find_config_differences
from hlat.study.run_record import RunRecord
from hlat.study.study_analysis import (
    Comparison,
    Point,
    analyze_study,
    format_answer,
)
from hlat.study.study_points import (
    StudyPoint,
    build_study_point,
    find_unused_seed,
    get_scale,
)
from hlat.tracking.text_format import (
    format_setting,
)

_IGNORED_PREFIX = "tracking."
"""Prefix of settings that runs of several studies differ in, without effect on the metric."""
_START_KEY = "checkpoint.start_from"


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
    criteria: list[RateCriterion] = field(default_factory=list)
    divergence: list[DivergenceComparison] = field(default_factory=list)

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
                *(
                    f"{each.name}: {format_answer(one, each.design)} ({_format_numbers(one)})"
                    for each in self.criteria
                    for one in each.comparisons
                ),
                *map(format_divergence, self.divergence),
                *(format_transfer(one, self.design) for one in self.transfers),
                *(format_tuning(one, self.design) for one in self.tunings if not self.criteria),
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
    seeds = pop_seeds(axes)
    design = _find_design(records, axes)
    has_design = bool(design.baseline) or design.lr_grid.factor is not None
    if not axes or not (seeds or has_design):
        return None
    members: dict[Point, dict[str, RunRecord]] = {}
    for i, record in enumerate(records):
        point = tuple((key, values[i]) for key, values in axes.items())
        runs = members.setdefault(point, {})
        runs[find_unused_seed(seeds[i] if seeds else "", runs)] = record
    influences = compute_influences(records, design.metric)
    by_run = {id(record): each for record, each in zip(records, influences, strict=True)}
    points = {
        point: build_study_point(runs, design.metric, by_run) for point, runs in members.items()
    }
    outcomes = {point: one.runs for point, one in points.items()}
    problem = find_text_problem(records, design.metric)
    scales = {point: get_scale(runs, design) for point, runs in members.items()}
    if tunings := analyze_tunings(outcomes, design, scales):
        transfers = analyze_transfer(tunings, design)
        result = StudyResult(design, points, [], [], num_planned, problem, tunings, transfers)
        if not compares_over_rates(design):
            return result
        initial = {point: one.initial_values for point, one in points.items()}
        criteria = analyze_rate_criteria(outcomes, initial, design)
        return replace(result, criteria=criteria, divergence=compare_divergence(outcomes, design))
    comparisons = analyze_study(outcomes, design, num_planned)
    factor_effects = analyze_factor_effects(outcomes, design)
    return StudyResult(design, points, comparisons, factor_effects, num_planned, problem)


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


def _format_numbers(comparison: Comparison) -> str:
    difference = comparison.difference
    return (
        f"difference {format_metric(difference.mean, signed=True)}, interval "
        f"{format_interval(difference.low, difference.high)}, "
        f"p {format_p_value(comparison.p_value)}"
    )


def _name_baseline(baseline: dict[str, Any], axes: dict[str, list[str]]) -> dict[str, Any]:
    """Return the baseline with the keys and texts of the axes; a group has the key of its name."""
    named = {}
    for key, value in baseline.items():
        axis = key if key in axes else f"{key}.name"
        if axis in axes:
            named[axis] = format_setting(value)
    return named
