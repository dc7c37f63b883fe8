"""Paired comparisons, their correction, and what diverged runs count."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from hlat.study.paired_test import (
    PointRuns,
    adjust_p_values,
    compare_paired,
    compute_mcnemar_p_value,
    compute_mean_interval,
)
from hlat.study.rank_test import compute_sequential_rank_p_value, compute_signed_rank_p_value

BASELINE = PointRuns({"1": 2.0, "2": 2.5, "3": 2.2, "4": 2.4})
POINT = PointRuns({"1": 2.1, "2": 2.7, "3": 2.25, "5": 9.0})


def test_difference_is_computed_from_common_seeds() -> None:
    found = compare_paired(POINT, BASELINE)
    ones, others = [2.1, 2.7, 2.25], [2.0, 2.5, 2.2]
    expected = stats.ttest_rel(ones, others)
    interval = expected.confidence_interval(0.95)
    assert found.num_pairs == 3
    assert found.mean == pytest.approx(np.mean(ones) - np.mean(others))
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.effect_size == pytest.approx(found.mean / found.std * (1 - 3 / 7))


def test_one_pair_has_no_p_value() -> None:
    found = compare_paired(PointRuns({"1": 1.0}), BASELINE)
    assert found.mean == -1.0
    assert math.isnan(found.p_value)
    assert math.isnan(found.low)


def test_equal_differences_have_a_p_value() -> None:
    assert compare_paired(BASELINE, BASELINE).p_value == 1.0
    shifted = PointRuns({seed: value + 0.5 for seed, value in {"1": 1.0, "2": 2.0}.items()})
    assert compare_paired(shifted, PointRuns({"1": 1.0, "2": 2.0})).p_value == 0.0


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_a_diverged_run_is_worse_than_every_other(higher_is_better: bool) -> None:
    """Compare eight better runs with the same runs and a diverged one: weaker evidence."""
    sign = 1 if higher_is_better else -1
    seeds = [str(seed) for seed in range(9)]
    baseline = PointRuns(dict.fromkeys(seeds, 2.0))
    finished = {seed: 2.0 + sign * (0.1 + 0.01 * int(seed)) for seed in seeds[:8]}
    eight = compare_paired(PointRuns(finished), baseline, higher_is_better=higher_is_better)
    nine = compare_paired(
        PointRuns(finished, frozenset(["8"])), baseline, higher_is_better=higher_is_better
    )
    ranks = [1, 2, 3, 4, 5, 6, 7, 8, -9]
    assert nine.p_value == pytest.approx(stats.wilcoxon(ranks).pvalue)
    ties = np.array([1.0, 1, 2, -3, math.inf, math.inf])
    sums = [np.dot(signs, [1.5, 1.5, 3, 4, 5.5, 5.5]) for signs in product([0, 1], repeat=6)]
    exact = 2 * np.mean([each >= 17 for each in sums])
    assert compute_signed_rank_p_value(ties) == pytest.approx(exact)
    assert eight.p_value < 0.05 < nine.p_value
    assert (nine.num_pairs, nine.num_diverged, nine.num_baseline_diverged) == (8, 1, 0)
    assert nine.mean == eight.mean


def test_diverged_runs_of_the_worse_point_are_further_evidence() -> None:
    values = {str(seed): 2.0 + 0.01 * seed for seed in range(4)}
    worse = {seed: value + 0.1 + 0.003 * int(seed) for seed, value in values.items()}
    baseline = PointRuns(values | {"4": 2.0})
    three = compare_paired(PointRuns(worse), baseline)
    found = compare_paired(PointRuns(worse, frozenset(["4"])), baseline)
    assert found.p_value == pytest.approx(2 * three.p_value)


def test_equal_counts_of_diverged_runs_preserve_the_difference() -> None:
    values = {str(seed): 2.0 + 0.01 * seed for seed in range(6)}
    worse = {seed: value + 0.1 + 0.003 * int(seed) for seed, value in values.items()}
    alone = compare_paired(PointRuns(worse), PointRuns(values))
    point = PointRuns(worse | {"6": 2.0}, frozenset(["7"]))
    found = compare_paired(point, PointRuns(values | {"7": 2.0}, frozenset(["6"])))
    assert found.p_value == pytest.approx(2 * alone.p_value)


@pytest.mark.slow
def test_ranks_of_several_looks_reject_at_the_nominal_rate() -> None:
    """Allow a lower rate, because the rank statistic is discrete."""
    generator = np.random.default_rng(3)
    differences = generator.standard_normal((300, 8))
    differences[generator.random(differences.shape) < 0.3] = math.inf
    differences *= generator.choice([-1, 1], differences.shape)
    p_values = [compute_sequential_rank_p_value(row, 8) for row in differences]
    assert 0.01 < np.mean(np.array(p_values) < 0.05) < 0.05 + 0.038
    looks = [compute_sequential_rank_p_value(differences[0, :k], 8) for k in range(1, 9)]
    assert looks == sorted(looks, reverse=True), "a later look never withdraws a verdict"


def test_a_point_that_always_diverges_is_stopped() -> None:
    """Stop after seven of eight planned seeds, where tests with Bonferroni would never reject."""
    seeds = [str(seed) for seed in range(7)]
    found = compare_paired(
        PointRuns({}, frozenset(seeds)), PointRuns(dict.fromkeys(seeds, 2.0)), num_planned=8
    )
    assert 2**-6 < found.p_value < 0.05 < 7 * 2**-6


def test_runs_that_diverged_with_both_have_no_effect() -> None:
    both = frozenset(["8", "9"])
    point, baseline = PointRuns(POINT.values, both), PointRuns(BASELINE.values, both)
    found = compare_paired(point, baseline)
    assert found.p_value == compare_paired(POINT, BASELINE).p_value
    assert (found.num_diverged, found.num_baseline_diverged) == (2, 2)


def test_holm_multiplies_the_smallest_by_the_number_of_tests() -> None:
    """Use the levels of Holm (1979): alpha / m, alpha / (m - 1), ..., increasing."""
    adjusted = adjust_p_values([0.03, math.nan, 0.01, 0.025, 0.9])
    assert adjusted[2] == pytest.approx(0.04)
    assert adjusted[3] == pytest.approx(0.075)
    assert adjusted[0] == pytest.approx(0.075), "never below a smaller p value"
    assert adjusted[4] == pytest.approx(0.9)
    assert math.isnan(adjusted[1])


def test_interval_of_a_mean() -> None:
    values = [1.0, 2.0, 4.0]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert compute_mean_interval(values) == pytest.approx((np.mean(values), low, high))
    assert math.isnan(compute_mean_interval([1.0])[1])


@pytest.mark.parametrize(("better", "worse"), [(3, 9), (9, 3), (5, 5), (0, 1), (2000, 2100)])
def test_mcnemar_is_a_binomial_test_of_the_pairs_that_differ(better: int, worse: int) -> None:
    expected = stats.binomtest(better, better + worse).pvalue
    assert compute_mcnemar_p_value(better, worse) == pytest.approx(expected)
    assert compute_mcnemar_p_value(0, 0) == 1


def test_the_evaluation_set_widens_the_interval_by_its_paired_error() -> None:
    """Compute the error of a mean over seeds and documents, against the formula."""
    rng = np.random.default_rng(0)
    hard = rng.standard_normal(9)  # the same for all runs, and therefore without effect
    noise = {name: {s: rng.standard_normal(9) / 100 for s in "123"} for name in "ab"}
    point, baseline = (
        PointRuns(
            {seed: runs.values[seed] for seed in "123"},
            influences={seed: hard + values for seed, values in noise[name].items()},
        )
        for name, runs in {"a": POINT, "b": BASELINE}.items()
    )
    found = compare_paired(point, baseline)
    plain = compare_paired(PointRuns(point.values), PointRuns(baseline.values))
    differences = np.mean([noise["a"][seed] - noise["b"][seed] for seed in "123"], axis=0)
    assert found.evaluation_error == pytest.approx(math.sqrt((differences**2).sum()))
    error = math.hypot(found.std / math.sqrt(3), found.evaluation_error)
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, 2) * error)
    assert found.p_value == pytest.approx(2 * stats.t.sf(found.mean / error, 2))
    assert found.p_value > plain.p_value
    assert math.isnan(plain.evaluation_error)
    sequential = compare_paired(point, baseline, num_planned=3)
    assert sequential.p_value >= found.p_value
    missing = PointRuns(point.values, influences={"1": hard})
    assert compare_paired(missing, baseline).p_value == plain.p_value
