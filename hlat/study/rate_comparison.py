"""Comparison of settings over a grid of learning rates: lowest metric, sensitivity, divergence.

An instability that a model of this size does not show at its best rate can appear at higher rates
(arXiv 2309.14322).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hlat.config.lr_grid import LR_KEY
from hlat.config.study import Direction, StudyConfig
from hlat.study.difference_format import format_p_value
from hlat.study.factor_effects import FactorEffect, analyze_factor_effects
from hlat.study.paired_test import PointRuns, adjust_p_values, compute_mcnemar_p_value
from hlat.study.study_analysis import (
    Comparison,
    Point,
    analyze_study,
    find_baselines,
    format_point_pair,
)

LOWEST, SENSITIVITY = "best value over the rates", "learning-rate sensitivity"
CRITERIA = (LOWEST, SENSITIVITY)
DIVERGENCE_CAPTION = "Diverged runs among pairs of equal rate and seed; p of McNemar's exact test"

Values = Mapping[Point, Mapping[str, float]]
"""Numbers by point and seed."""


@dataclass(frozen=True)
class RateCriterion:
    """Comparisons by one number of each setting and seed, and effects over factors.

    `design` is that of the study with its alpha divided by the number of criteria.
    """

    name: str
    design: StudyConfig
    points: dict[Point, PointRuns]
    comparisons: list[Comparison]
    effects: list[FactorEffect]

    @property
    def label(self) -> str:
        """Criterion with its metric."""
        return f"{self.name} of {self.design.metric}"


@dataclass(frozen=True)
class DivergenceComparison:
    """Diverged runs of a setting and its baseline, among pairs with the same rate and seed.

    `p_value` is that of McNemar's exact test, corrected for all comparisons (Holm).
    """

    label: str
    num_pairs: int
    num_diverged: int
    num_baseline_diverged: int
    p_value: float


def compares_over_rates(design: StudyConfig) -> bool:
    """Return True if a study has a grid of learning rates and a baseline to compare with."""
    return design.lr_grid.factor is not None and bool(design.baseline)


def group_by_setting(points: Iterable[Point]) -> dict[Point, dict[float, Point]]:
    """Return the points by learning rate for each setting of the other factors."""
    groups: dict[Point, dict[float, Point]] = {}
    for point in points:
        rate = dict(point).get(LR_KEY)
        if rate is not None:
            setting = tuple(pair for pair in point if pair[0] != LR_KEY)
            groups.setdefault(setting, {})[float(rate)] = point
    return groups


def analyze_rate_criteria(
    points: Mapping[Point, PointRuns], initial_values: Values, design: StudyConfig
) -> list[RateCriterion]:
    """Return the comparisons of the lowest metric and of the sensitivity.

    The sensitivity is the mean over the rates of min(loss, initial loss) less the lowest loss
    (arXiv 2309.14322, section 2.2); that of a diverged run is the initial loss. Only seeds that
    ended with all rates count.

    Args:
        points: Runs of each point.
        initial_values: Metric before the first step by point and seed.
        design: Design of a study for which `compares_over_rates` is true.
    """
    sign = -1.0 if design.direction is Direction.maximize else 1.0
    lowest: dict[Point, dict[str, float]] = {}
    sensitivities: dict[Point, dict[str, float]] = {}
    for setting, by_rate in group_by_setting(points).items():
        losses = _list_losses([points[point] for point in by_rate.values()], sign)
        initial = {
            seed: value for one in by_rate.values() for seed, value in initial_values[one].items()
        }
        finite = {seed: each for seed, each in losses.items() if math.isfinite(min(each))}
        lowest[setting] = {seed: sign * min(each) for seed, each in finite.items()}
        sensitivities[setting] = {
            seed: _compute_sensitivity(each, sign * initial[seed])
            for seed, each in finite.items()
            if seed in initial
        }
    own = replace(design, alpha=design.alpha / len(CRITERIA))
    return [
        _build_criterion(LOWEST, lowest, own),
        _build_criterion(SENSITIVITY, sensitivities, replace(own, direction=Direction.minimize)),
    ]


def compare_divergence(
    points: Mapping[Point, PointRuns], design: StudyConfig
) -> list[DivergenceComparison]:
    """Return the comparisons of the diverged runs; empty if no run diverged."""
    if not any(runs.diverged for runs in points.values()):
        return []
    groups, found = group_by_setting(points), []
    for setting, baseline in find_baselines([*groups], design.baseline):
        pairs = [
            (seed in points[groups[setting][rate]].diverged, seed in points[other].diverged)
            for rate, other in groups[baseline].items()
            if rate in groups[setting]
            for seed in _list_ended(points[other]) & _list_ended(points[groups[setting][rate]])
        ]
        found.append((format_point_pair(setting, baseline), pairs))
    p_values = adjust_p_values(
        [
            compute_mcnemar_p_value(pairs.count((True, False)), pairs.count((False, True)))
            for _, pairs in found
        ]
    )
    return [
        DivergenceComparison(
            label, len(pairs), sum(one for one, _ in pairs), sum(other for _, other in pairs), p
        )
        for (label, pairs), p in zip(found, p_values, strict=True)
    ]


def build_divergence_table(
    found: Sequence[DivergenceComparison],
) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and a row for each comparison."""
    headers = ["Comparison", "Pairs", "Diverged", "Diverged of the baseline", "p (Holm)"]
    return headers, [
        [
            one.label,
            str(one.num_pairs),
            str(one.num_diverged),
            str(one.num_baseline_diverged),
            format_p_value(one.p_value),
        ]
        for one in found
    ]


def format_divergence(one: DivergenceComparison) -> str:
    """Return a comparison of diverged runs as a sentence."""
    return (
        f"diverged runs: {one.label}: {one.num_diverged} and {one.num_baseline_diverged} of "
        f"{one.num_pairs} (p {format_p_value(one.p_value)})"
    )


def _build_criterion(name: str, values: Values, design: StudyConfig) -> RateCriterion:
    points = {setting: PointRuns(by_seed) for setting, by_seed in values.items()}
    comparisons = analyze_study(points, design)
    return RateCriterion(name, design, points, comparisons, analyze_factor_effects(points, design))


def _list_losses(runs: Sequence[PointRuns], sign: float) -> dict[str, list[float]]:
    """Return the losses over the rates of each seed that ended with all; infinite if diverged."""
    seeds = set.intersection(*map(_list_ended, runs))
    return {
        seed: [sign * one.values[seed] if seed in one.values else math.inf for one in runs]
        for seed in sorted(seeds)
    }


def _compute_sensitivity(losses: Sequence[float], initial_loss: float) -> float:
    return sum(min(loss, initial_loss) for loss in losses) / len(losses) - min(losses)


def _list_ended(runs: PointRuns) -> set[str]:
    return {*runs.values, *runs.diverged}
