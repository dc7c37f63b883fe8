"""Optimum of synthetic loss curves: exact parabolas, coverage of intervals, edges, divergence."""

import math

import numpy as np
import pytest

from hlat.study.lr_optimum import LrCurve, OptimumStatus, find_lr_optimum, sample_lr_optima
from hlat.study.lr_tuning import compute_movement

RATES = 2e-3 * 2.0 ** np.arange(-3, 4)
FOUND = OptimumStatus.found


def _build_curve(values, num_diverged=None):
    values = np.atleast_2d(values)
    counts = np.zeros(values.shape[1], np.int64) if num_diverged is None else num_diverged
    return LrCurve(RATES[: values.shape[1]], values, np.asarray(counts))


def _simulate(best, noise, num_seeds, generator):
    parabola = 2 + 0.02 * np.log2(RATES / best) ** 2
    offsets = generator.normal(0, 0.05, (num_seeds, 1))
    return parabola + offsets + generator.normal(0, noise, (num_seeds, len(RATES)))


@pytest.mark.parametrize("best", [0.9e-3, 2e-3, 3.1e-3])
def test_an_exact_parabola_is_recovered(best):
    values = 2 + 0.02 * np.log2(RATES / best) ** 2
    optimum = find_lr_optimum(_build_curve([values, values + 0.5]))
    assert optimum.status is FOUND
    assert optimum.rate == pytest.approx(best, rel=1e-9)
    assert optimum.value == pytest.approx(2.25, rel=1e-9)
    assert (optimum.low, optimum.high) == pytest.approx((best, best), rel=1e-6)
    assert optimum.predict(RATES[2:5]) == pytest.approx(values[2:5] + 0.25, rel=1e-9)


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_the_interval_contains_the_optimum_in_95_percent_of_studies(num_seeds):
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        best = 2e-3 * 2 ** generator.uniform(-0.9, 0.9)
        curve = _build_curve(_simulate(best, 0.004, num_seeds, generator))
        optimum = find_lr_optimum(curve)
        assert optimum.status is FOUND
        hits += optimum.low <= best <= optimum.high
    # 0.95 +- three standard deviations of a binomial distribution of 400
    assert 0.917 <= hits / 400 <= 0.983


def test_a_seed_with_another_level_does_not_widen_the_interval():
    values = _simulate(2e-3, 0.004, 3, np.random.default_rng(1))
    shifted = values + np.array([[0.0], [5.0], [-5.0]])
    one, other = (find_lr_optimum(_build_curve(each)) for each in (values, shifted))
    assert (other.low, other.high) == pytest.approx((one.low, one.high), rel=1e-9)


def test_the_interval_agrees_with_the_roots_of_a_t_test():
    """The statistic of slope + 2 v curvature is the quantile at both ends (Fieller 1954)."""
    special = pytest.importorskip("scipy.special")
    optimum = find_lr_optimum(_build_curve(_simulate(1.2e-3, 0.01, 2, np.random.default_rng(2))))
    quantile = special.stdtrit(optimum.degrees, 0.975)
    for end in (optimum.low, optimum.high):
        weights = np.array([1, 2 * math.log2(end / optimum.center)])
        error = math.sqrt(weights @ optimum.covariance @ weights)
        assert abs(weights @ optimum.coefficients[1:]) / error == pytest.approx(quantile, rel=1e-6)
    distances = np.log2([optimum.rate / optimum.low, optimum.high / optimum.rate])
    assert distances[0] != pytest.approx(distances[1], rel=1e-3)


def test_only_the_neighbours_of_the_lowest_mean_are_fitted():
    values = 2 + 0.02 * np.log2(RATES / 1.1e-3) ** 2
    values[5:] += 3.0  # above the fitted rates, a loss that no parabola describes
    optimum = find_lr_optimum(_build_curve(values))
    assert optimum.fitted == pytest.approx(RATES[:5])
    assert optimum.rate == pytest.approx(1.1e-3, rel=1e-9)


@pytest.mark.parametrize(("factor", "num_fitted"), [(2**0.5, 9), (2, 5), (3, 3), (10, 3)])
def test_the_fitted_rates_are_within_a_factor_of_4_or_neighbours(factor, num_fitted):
    rates = np.array([float(f"{2e-3 * factor**n:.4g}") for n in range(-6, 7)])
    values = np.atleast_2d(2 + 0.02 * np.log2(rates / 2.1e-3) ** 2)
    optimum = find_lr_optimum(LrCurve(rates, values, np.zeros(len(rates), np.int64)))
    first = 6 - num_fitted // 2
    assert optimum.fitted == pytest.approx(rates[first : first + num_fitted])
    assert optimum.rate == pytest.approx(2.1e-3, rel=1e-9)


@pytest.mark.parametrize(
    ("best", "status"), [(1e-5, OptimumStatus.below), (1.0, OptimumStatus.above)]
)
def test_an_edge_of_the_grid_is_no_optimum(best, status):
    optimum = find_lr_optimum(_build_curve(np.log2(RATES / best) ** 2))
    assert optimum.status is status
    assert math.isnan(optimum.rate)
    assert optimum.center == (RATES[0] if status is OptimumStatus.below else RATES[-1])


def test_rates_with_diverged_runs_are_excluded():
    values = np.array([2 + 0.02 * np.log2(RATES / 1.5e-3) ** 2] * 2)
    values[0, 5:] = math.nan
    values[1, 5:] = 1.0  # a run that finished at a rate where another one diverged
    optimum = find_lr_optimum(_build_curve(values, [0, 0, 0, 0, 0, 1, 1]))
    assert optimum.rate == pytest.approx(1.5e-3, rel=1e-9)
    assert optimum.num_seeds == 2


def test_the_best_rate_below_diverged_ones_is_the_edge_of_divergence():
    values = np.log2(RATES / 1.0) ** 2
    values[5:] = math.nan
    optimum = find_lr_optimum(_build_curve(values, [0, 0, 0, 0, 0, 1, 1]))
    assert optimum.status is OptimumStatus.unstable
    assert optimum.center == RATES[4]


def test_noise_without_curvature_has_no_optimum():
    generator = np.random.default_rng(3)
    curves = [_build_curve(generator.normal(2, 0.01, (3, len(RATES)))) for _ in range(500)]
    statuses = [find_lr_optimum(curve).status for curve in curves]
    # 0.05, and three standard deviations of a binomial distribution of 500
    assert statuses.count(FOUND) / len(statuses) < 0.08
    assert OptimumStatus.not_convex in statuses


def test_seeds_with_missing_runs_are_excluded():
    values = np.array([2 + 0.02 * np.log2(RATES / 2e-3) ** 2] * 3)
    values[2, 0] = math.nan
    assert find_lr_optimum(_build_curve(values)).num_seeds == 2
    assert find_lr_optimum(_build_curve(values[2:])).status is OptimumStatus.incomplete
    assert find_lr_optimum(_build_curve(values[:, :2])).status is OptimumStatus.incomplete


def test_three_rates_of_one_seed_have_an_optimum_without_interval():
    optimum = find_lr_optimum(_build_curve([2.1, 2.0, 2.1]))
    assert optimum.rate == pytest.approx(RATES[1], rel=1e-9)
    assert math.isnan(optimum.low)
    assert np.isnan(sample_lr_optima(optimum, 3, np.random.default_rng(0))).all()


@pytest.mark.parametrize("exponent", [0.0, -1.0])
def test_the_movement_of_exact_optima_is_exact(exponent):
    scales = [64, 128, 256, 512]
    optima = [
        find_lr_optimum(_build_curve(np.log2(RATES / (2e-3 * (n / 181) ** exponent)) ** 2 + 1))
        for n in scales
    ]
    movement = compute_movement(scales, optima, 2**0.5)
    assert movement.exponent == pytest.approx(exponent, abs=1e-9)
    assert movement.steps == pytest.approx(6 * exponent, abs=1e-9)
    assert (movement.low, movement.high) == pytest.approx((movement.steps,) * 2, abs=1e-6)


def test_the_interval_of_the_movement_has_its_coverage():
    generator = np.random.default_rng(4)
    scales, hits = [64, 128, 256, 512], 0
    for _ in range(100):
        optima = [
            find_lr_optimum(_build_curve(_simulate(2e-3 * (n / 181) ** -0.5, 0.004, 2, generator)))
            for n in scales
        ]
        movement = compute_movement(scales, optima, 2.0)
        hits += movement.low <= -1.5 <= movement.high
    # 0.95 +- three standard deviations of a binomial distribution of 100
    assert hits / 100 >= 0.88


def test_one_size_has_no_movement():
    optimum = find_lr_optimum(_build_curve(np.log2(RATES / 2e-3) ** 2))
    assert compute_movement([64, 64], [optimum, optimum], 2.0) is None
