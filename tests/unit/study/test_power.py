"""Power of paired and sequential tests, against published values and simulations."""

import math

import numpy as np
import pytest

from hlat.study.power import (
    compute_detectable_difference,
    compute_power,
    compute_required_seeds,
    estimate_checkpoint_noise,
    estimate_difference_std,
)
from hlat.study.sequential_test import (
    compute_sequential_detectable_difference,
    compute_sequential_p_value,
)


def test_power_of_a_published_example() -> None:
    """Cohen (1988): an effect of 0.5 needs 34 pairs for 80% power at 5%; 0.8 needs 15."""
    assert compute_required_seeds(0.5, 1.0) == 34
    assert compute_required_seeds(0.8, 1.0) == 15
    assert compute_power(0.5, 1.0, 34) == pytest.approx(0.808, abs=0.001)
    assert compute_power(0.0, 1.0, 5) == pytest.approx(0.05)


def test_detectable_difference_has_the_stated_power() -> None:
    difference = compute_detectable_difference(0.02, 3, 0.025)
    assert compute_power(difference, 0.02, 3, 0.025) == pytest.approx(0.8, abs=1e-6)
    assert compute_detectable_difference(0.02, 1) == math.inf
    assert compute_required_seeds(1e-6, 1.0) is None
    assert compute_power(1e3, 1.0, 3) == 1.0


def test_spread_of_differences_is_pooled_over_pairs_of_points() -> None:
    common = np.random.default_rng(0).normal(0, 5, 400)
    noise = np.random.default_rng(1).normal(0, 0.1, (3, 400))
    points = [{str(i): common[i] + row[i] for i in range(400)} for row in noise]
    std, num_runs = estimate_difference_std(points)
    assert std == pytest.approx(0.1 * math.sqrt(2), rel=0.05)
    assert num_runs == 1200
    assert math.isnan(estimate_difference_std([{"1": 1.0}, {"1": 2.0}])[0])


@pytest.mark.slow
def test_repeated_looks_reject_at_the_nominal_rate() -> None:
    """Correct a t-test after each of five seeds, which rejects 12% of true null hypotheses."""
    generator = np.random.default_rng(7)
    rejected = 0
    for _ in range(1000):
        differences = generator.standard_normal(5)
        looks = [compute_sequential_p_value(differences[:k], 5) for k in range(2, 6)]
        assert looks == sorted(looks, reverse=True), "a later look never withdraws a verdict"
        rejected += looks[-1] < 0.05
    assert rejected / 1000 == pytest.approx(0.05, abs=0.021)


def test_looks_reduce_power_slightly() -> None:
    once = compute_detectable_difference(1.0, 5)
    assert once < compute_sequential_detectable_difference(1.0, 5) < 1.15 * once


def test_noise_of_checkpoints_excludes_the_trend() -> None:
    noise = np.random.default_rng(2).normal(0, 0.01, (2000, 6))
    trend = np.array([3.0, 2.5, 2.2, 2.0, 1.9, 1.85])
    line = np.linspace(3, 2, 6)
    squares = [estimate_checkpoint_noise(row + line) ** 2 for row in noise]
    assert math.sqrt(np.mean(squares)) == pytest.approx(0.01, rel=0.05)
    assert estimate_checkpoint_noise(trend[:2]) != estimate_checkpoint_noise(trend[:2])
    assert estimate_checkpoint_noise([*trend, *line]) == pytest.approx(0, abs=1e-12)
