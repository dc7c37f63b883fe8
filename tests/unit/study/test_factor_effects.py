"""Mean effects and interactions of a study against tests of scipy."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from hlat.config.study import StudyConfig
from hlat.study.factor_effects import analyze_factor_effects
from hlat.study.paired_test import PointRuns
from hlat.study.study_analysis import Point

SEEDS = [str(seed) for seed in range(1, 6)]
DESIGN = StudyConfig(baseline={"beta2": "0.95"})


def _build_points(values: np.ndarray) -> dict[Point, PointRuns]:
    """Return three precisions with two values of beta2 each, from an array [3, 2, seed]."""
    return {
        (("precision", precision), ("beta2", beta2)): PointRuns(
            dict(zip(SEEDS, values[i, j], strict=True))
        )
        for i, precision in enumerate("abc")
        for j, beta2 in enumerate(("0.95", "0.99"))
    }


def test_mean_effect_and_interactions_equal_tests_of_scipy() -> None:
    values = np.random.default_rng(0).normal(2.0, 0.1, (3, 2, 5))
    found = analyze_factor_effects(_build_points(values), DESIGN)
    effects = values[:, 1] - values[:, 0]
    expected = {
        "beta2=0.99 - beta2=0.95, mean": effects.mean(0),
        "beta2=0.99 - beta2=0.95, precision=b - precision=a": effects[1] - effects[0],
        "beta2=0.99 - beta2=0.95, precision=c - precision=a": effects[2] - effects[0],
    }
    assert [one.label for one in found] == list(expected)
    tests = [stats.ttest_1samp(differences, 0.0) for differences in expected.values()]
    for one, test, differences in zip(found, tests, expected.values(), strict=True):
        assert one.difference.mean == pytest.approx(differences.mean())
        assert one.difference.p_value == pytest.approx(test.pvalue)
        low, high = test.confidence_interval()
        assert (one.difference.low, one.difference.high) == pytest.approx((low, high))
    adjusted = np.sort([test.pvalue for test in tests]) * [3, 2, 1]
    adjusted = np.minimum(np.maximum.accumulate(adjusted), 1)
    assert sorted(one.p_value for one in found) == pytest.approx(adjusted)


def test_a_diverged_run_counts_in_the_mean_effect() -> None:
    points = _build_points(np.arange(30.0).reshape(3, 2, 5) ** 1.5)
    point = (("precision", "b"), ("beta2", "0.99"))
    values = {seed: value for seed, value in points[point].values.items() if seed != "3"}
    points[point] = PointRuns(values, frozenset({"3"}))
    mean, interaction, other = analyze_factor_effects(points, DESIGN)
    assert (mean.difference.num_pairs, mean.difference.num_diverged) == (4, 1)
    assert (interaction.difference.num_pairs, other.difference.num_pairs) == (4, 5)


def test_no_effects_without_other_factors_or_with_stopping() -> None:
    points = _build_points(np.arange(30.0).reshape(3, 2, 5) ** 1.5)
    assert analyze_factor_effects(points, replace(DESIGN, stop_worse=True)) == []
    single = {point: runs for point, runs in points.items() if dict(point)["precision"] == "a"}
    assert analyze_factor_effects(single, DESIGN) == []
