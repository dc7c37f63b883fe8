"""Effects of a factor over all values of the other factors: their mean, and their dependence.

An interaction is the difference between two effects of the same factor, paired by seed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from hlat.config.study import Direction, StudyConfig
from hlat.study.paired_test import PairedDifference, PointRuns, adjust_p_values, compare_paired
from hlat.study.study_analysis import Point, find_baselines, format_point_pair

Pair = tuple[Point, Point]


@dataclass(frozen=True)
class FactorEffect:
    """A mean effect or an interaction; `p_value` is corrected for all of them in a study."""

    label: str
    difference: PairedDifference
    p_value: float


def analyze_factor_effects(
    points: Mapping[Point, PointRuns], design: StudyConfig
) -> list[FactorEffect]:
    """Return the mean effect of each change from the baseline, and its interactions.

    A change that was made with only one value of the other factors is omitted. The tests are not
    valid with sequential stopping, so that a study with it has no results.
    """
    if design.stop_worse:
        return []
    found = [
        effect
        for (point, baseline), pairs in _group_pairs(points, design).items()
        if len(pairs) > 1
        for effect in _compare_contexts(format_point_pair(point, baseline), pairs, points, design)
    ]
    p_values = adjust_p_values([difference.p_value for _, difference in found])
    return [FactorEffect(*one, p_value) for one, p_value in zip(found, p_values, strict=True)]


def _group_pairs(
    points: Mapping[Point, PointRuns], design: StudyConfig
) -> dict[Pair, dict[Point, Pair]]:
    """Return the comparisons of each change, by the values of the other factors."""
    groups: dict[Pair, dict[Point, Pair]] = {}
    for point, baseline in find_baselines(list(points), design.baseline):
        changed = [pair for pair in zip(point, baseline, strict=True) if pair[0] != pair[1]]
        others = tuple(one for one, other in zip(point, baseline, strict=True) if one == other)
        one, other = zip(*changed, strict=True)
        groups.setdefault((one, other), {})[others] = (point, baseline)
    return groups


def _compare_contexts(
    label: str,
    pairs: Mapping[Point, Pair],
    points: Mapping[Point, PointRuns],
    design: StudyConfig,
) -> list[tuple[str, PairedDifference]]:
    """Return the mean effect, and the effect of each other context less that of the first."""

    def compare(one: PointRuns, other: PointRuns) -> PairedDifference:
        return compare_paired(
            one,
            other,
            higher_is_better=design.direction is Direction.maximize,
            confidence=1 - design.alpha,
        )

    sides = [
        _average([points[side] for side in sides]) for sides in zip(*pairs.values(), strict=True)
    ]
    first, *others = pairs
    effects = {key: _subtract(points[one], points[other]) for key, (one, other) in pairs.items()}
    return [
        (f"{label}, mean", compare(*sides)),
        *[
            (f"{label}, {format_point_pair(other, first)}", compare(effects[other], effects[first]))
            for other in others
        ],
    ]


def _average(runs: Iterable[PointRuns]) -> PointRuns:
    """Return the mean over points of each seed, which diverged if it did with one of them."""
    runs = list(runs)
    seeds = set.intersection(*[{*one.values} for one in runs])
    values = {seed: fmean(one.values[seed] for one in runs) for seed in seeds}
    influences = {
        seed: np.mean([one.influences[seed] for one in runs], axis=0)
        for seed in seeds
        if all(seed in one.influences for one in runs)
    }
    return PointRuns(values, frozenset().union(*[one.diverged for one in runs]), influences)


def _subtract(one: PointRuns, other: PointRuns) -> PointRuns:
    """Return the difference of each seed that finished with both."""
    return PointRuns(
        {s: value - other.values[s] for s, value in one.values.items() if s in other.values},
        influences={
            s: influence - other.influences[s]
            for s, influence in one.influences.items()
            if s in other.influences
        },
    )
