"""Comparison of settings over a grid of learning rates: lowest metric, sensitivity, divergence.

An instability that a model of this size does not show at its best rate can appear at higher rates
(arXiv 2309.14322).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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
    lowest: dict[Point, PointRuns] = {}
    sensitivities: dict[Point, PointRuns] = {}
    for setting, by_rate in group_by_setting(points).items():
        curves = _list_curves([points[point] for point in by_rate.values()], sign)
        initial = {
            seed: sign * value
            for one in by_rate.values()
            for seed, value in initial_values[one].items()
        }
        lowest[setting] = _build_runs(
            {seed: (sign * min(one.losses), one.weigh_lowest()) for seed, one in curves.items()}
        )
        sensitivities[setting] = _build_runs(
            {
                seed: (one.compute_sensitivity(initial[seed]), one.weigh_sensitivity(initial[seed]))
                for seed, one in curves.items()
                if seed in initial
            }
        )
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
    """Return the numbers of diverged runs of both sides."""
    return (
        f"diverged runs: {one.label}: {one.num_diverged} and {one.num_baseline_diverged} of "
        f"{one.num_pairs} (p {format_p_value(one.p_value)})"
    )


@dataclass(frozen=True)
class _SeedCurve:
    """Losses of a seed over the rates, infinite if diverged, of which one is finite.

    `influences` are those of the documents on each metric; None: unknown.
    """

    losses: list[float]
    influences: list[NDArray[np.float64]] | None

    def compute_sensitivity(self, initial_loss: float) -> float:
        """Return the mean of the limited losses less the lowest loss."""
        limited = [min(loss, initial_loss) for loss in self.losses]
        return sum(limited) / len(limited) - min(limited)

    def weigh_lowest(self) -> NDArray[np.float64] | None:
        """Return the influence of the documents on the lowest loss."""
        return None if self.influences is None else self.influences[self._find_lowest()]

    def weigh_sensitivity(self, initial_loss: float) -> NDArray[np.float64] | None:
        """Return their influence on the sensitivity; that on the initial loss is neglected."""
        lowest = self.weigh_lowest()
        if self.influences is None or lowest is None:
            return None
        limited = [
            each
            for loss, each in zip(self.losses, self.influences, strict=True)
            if loss < initial_loss
        ]
        return np.asarray(sum(limited) / len(self.losses) - lowest)

    def _find_lowest(self) -> int:
        return min(range(len(self.losses)), key=self.losses.__getitem__)


def _build_criterion(
    name: str, points: dict[Point, PointRuns], design: StudyConfig
) -> RateCriterion:
    comparisons = analyze_study(points, design)
    return RateCriterion(name, design, points, comparisons, analyze_factor_effects(points, design))


def _build_runs(by_seed: Mapping[str, tuple[float, NDArray[np.float64] | None]]) -> PointRuns:
    """Return a number and the influences of the documents on it by seed."""
    influences = {seed: each for seed, (_, each) in by_seed.items() if each is not None}
    return PointRuns({seed: value for seed, (value, _) in by_seed.items()}, influences=influences)


def _list_curves(runs: Sequence[PointRuns], sign: float) -> dict[str, _SeedCurve]:
    """Return the curve of each seed that ended with all rates, and did not diverge with all."""
    curves = {}
    for seed in sorted(set.intersection(*map(_list_ended, runs))):
        losses = [sign * one.values.get(seed, sign * math.inf) for one in runs]
        known = [one.influences.get(seed) for one in runs if seed in one.values]
        size = next((len(each) for each in known if each is not None), 0)
        influences = [one.influences.get(seed, np.zeros(size)) for one in runs]
        if math.isfinite(min(losses)):
            has_all = all(each is not None for each in known)
            curves[seed] = _SeedCurve(losses, influences if has_all else None)
    return curves


def _list_ended(runs: PointRuns) -> set[str]:
    return {*runs.values, *runs.diverged}
