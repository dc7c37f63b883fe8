"""Intervals of predictions, optimum, influence and warnings of a fit of parameters and tokens."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize

from hlat.study.power_law import Array, PowerLaw
from hlat.study.scaling_analysis import analyze_points
from hlat.study.scaling_fit import (
    FitSettings,
    ScalingFit,
    allocate,
    build_interval,
    fit_scaling_law,
)
from hlat.study.scaling_points import ScalingPoints
from tests.unit.study.scaling_data import CONSTANTS, build_inputs, compute_losses, sample_losses

LAW = PowerLaw(
    np.array(CONSTANTS["E"]),
    np.array([CONSTANTS["A"], CONSTANTS["B"]]),
    np.array([CONSTANTS["alpha"], CONSTANTS["beta"]]),
)
TOKENS_PER_PARAMETER = (5, 10, 20, 40)
NUM_HELD_OUT = 20
NUM_LADDERS = 100


def build_points(inputs: Array, losses: Array) -> ScalingPoints:
    names = [str(i) for i in range(len(losses))]
    return ScalingPoints("test", "loss", names, *inputs, 6 * inputs.prod(0), losses, names)


def build_ladder() -> Array:
    """Return 6 sizes with 4 numbers of tokens and 2 seeds [2, 48]."""
    sizes = np.geomspace(5e5, 2e7, 6).repeat(2 * len(TOKENS_PER_PARAMETER))
    ratios = np.tile(np.repeat(TOKENS_PER_PARAMETER, 2), 6)
    return np.stack([sizes, sizes * ratios])


def fit(inputs: Array, losses: Array, num_samples: int = 20) -> ScalingFit:
    return fit_scaling_law(build_points(inputs, losses), FitSettings(num_samples=num_samples))


@pytest.fixture(scope="module")
def ladder() -> ScalingFit:
    inputs = build_ladder()
    return fit(inputs, sample_losses(inputs, 0.003, 0))


@pytest.mark.parametrize("product", [1e15, 1e19, 1e23])
def test_allocation_has_the_lowest_loss(product: float) -> None:
    parameters, tokens = allocate(LAW, product)

    def compute(log_parameters: float) -> float:
        n = np.exp(log_parameters)
        return float(LAW.predict(np.array([[n], [product / n]]))[0])

    best = optimize.minimize_scalar(compute, bounds=np.log([1e3, product / 1e3]), method="bounded")
    assert np.log(parameters) == pytest.approx(best.x, rel=1e-5)
    assert parameters * tokens == pytest.approx(product)


def test_optimum_has_the_loss_of_its_allocation(ladder: ScalingFit) -> None:
    flops = 1e17
    optimum = ladder.compute_optimum(flops)
    n, d = optimum.parameters.value, optimum.tokens.value
    assert 6 * n * d == pytest.approx(flops)
    prediction = ladder.predict(n, d)
    assert prediction.curve.value == pytest.approx(optimum.loss.value)
    assert prediction.run.value == prediction.curve.value
    assert prediction.run.high - prediction.run.low > prediction.curve.high - prediction.curve.low
    assert optimum.parameters.low < n < optimum.parameters.high


@pytest.mark.slow
def test_intervals_contain_the_constants() -> None:
    """Require 88 of 100; with 95% coverage, fewer have a probability of 0.15% (binomial)."""
    inputs = build_ladder()
    counts = dict.fromkeys(CONSTANTS, 0)
    for seed in range(NUM_LADDERS):
        points = build_points(inputs, sample_losses(inputs, 0.003, seed))
        one = fit_scaling_law(points, FitSettings(num_samples=200, seed=seed))
        for name, interval in one.constants.items():
            counts[name] += interval.low <= CONSTANTS[name] <= interval.high
    assert min(counts.values()) >= 0.88 * NUM_LADDERS, counts


@pytest.mark.slow
def test_intervals_of_predictions_contain_held_out_runs() -> None:
    """Require 18 of 20 ladders; the predicted run has 8 times the largest fitted compute."""
    inputs = build_ladder()
    size = np.sqrt(8 * inputs.prod(0).max() / TOKENS_PER_PARAMETER[2])
    held_out = np.array([[size], [size * TOKENS_PER_PARAMETER[2]]])
    count = 0
    for seed in range(NUM_HELD_OUT):
        one = fit(inputs, sample_losses(inputs, 0.003, seed), 200)
        measured = sample_losses(held_out, 0.003, 1000 + seed)[0]
        run = one.predict(*held_out[:, 0]).run
        count += run.low <= measured <= run.high
    assert count >= 0.9 * NUM_HELD_OUT


def test_a_wrong_point_has_the_largest_residual_and_influence() -> None:
    inputs = build_ladder()
    losses = sample_losses(inputs, 0.003, 0)
    losses[-1] *= 1.3
    one = fit(inputs, losses)
    assert one.residuals.argmax() == len(losses) - 1
    assert one.residuals[-1] == pytest.approx(np.log(1.3), abs=0.02)
    assert len(one.influences) == len(losses)
    assert one.influences[-1] > np.median(one.influences)


def test_influence_is_the_change_without_the_point() -> None:
    inputs = build_ladder()
    losses = sample_losses(inputs, 0.003, 0)
    one = fit(inputs, losses)
    other = fit(inputs[:, 1:], losses[1:])
    spread = one.samples.exponents.std(0)
    changes = np.abs(other.law.exponents - one.law.exponents) / spread
    e_change = np.log(other.law.irreducible / one.law.irreducible)
    e_change /= np.log(one.samples.irreducible).std()
    expected = max(*changes, abs(e_change))
    assert one.influences[0] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_ladder_has_no_warning_within_its_range(ladder: ScalingFit) -> None:
    """The exponents of 48 points are identified, and A and B within a factor of 10."""
    assert ladder.list_warnings([ladder.points.flops.max() * 9]) == []


def test_warnings_name_the_limit(ladder: ScalingFit) -> None:
    largest = float(ladder.points.flops.max())
    (warning,) = ladder.list_warnings([20 * largest])
    assert "are 20 times the largest fitted compute; beyond 10 times" in warning
    grouped = replace(ladder, points=replace(ladder.points, groups=["a", "b"] * 24))
    (warning,) = grouped.list_warnings()
    assert warning.startswith("2 groups are resampled; below 5, intervals are too narrow")


@pytest.mark.slow
def test_unidentified_constants_have_a_warning() -> None:
    """Tokens beyond 1e18 reduce the loss by less than its errors."""
    inputs = build_inputs()
    inputs[1] *= 1e7
    warnings = fit(inputs, sample_losses(inputs, 0.003, 0), 50).list_warnings()
    assert any(warning.startswith("B is not identified: its interval ") for warning in warnings)


@pytest.mark.slow
def test_an_irreducible_loss_of_zero_has_a_warning() -> None:
    inputs = build_inputs(4, 4)
    losses = compute_losses(inputs) - CONSTANTS["E"]
    warning = fit(inputs, losses, 5).list_warnings()[0]
    assert warning.startswith("E is not identified: it is ")


def test_optimum_outside_of_the_sizes_has_a_warning() -> None:
    inputs = build_inputs()
    inputs[0] /= 1e3
    (warning, *_) = fit(inputs, compute_losses(inputs)).list_warnings()[-1:]
    assert "parameters, is outside of the fitted sizes, 1e+04 to 1e+07; add points" in warning


def test_law_of_compute_follows_from_the_optima_of_curves() -> None:
    """Compare with the law of the best allocations, whose exponent is alpha beta / (alpha + beta).

    The parabola is an approximation, with an error of the loss of 0.1% at this width.
    """
    budgets = np.geomspace(1e19, 1e22, 7)
    best, _ = np.array([allocate(LAW, budget / 6) for budget in budgets]).T
    sizes = (best[:, None] * np.geomspace(0.5, 2, 6)).ravel()
    flops = budgets.repeat(6)
    inputs = np.stack([sizes, flops / (6 * sizes)])
    analysis = analyze_points(
        build_points(inputs, compute_losses(inputs)), FitSettings(num_samples=10)
    )
    law = analysis.compute_law
    assert law is not None
    assert law.of_curves
    np.testing.assert_allclose(law.flops, budgets)
    alpha, beta = CONSTANTS["alpha"], CONSTANTS["beta"]
    assert law.law.exponents[0] == pytest.approx(alpha * beta / (alpha + beta), rel=0.01)
    assert float(law.law.irreducible) == pytest.approx(CONSTANTS["E"], rel=0.01)
    (end,) = law.predict(budgets[-1:])
    assert end.value == pytest.approx(
        float(compute_losses(np.array([[best[-1]], [budgets[-1] / 6 / best[-1]]]))[0]), rel=1e-3
    )


def test_interval_has_the_quantiles_of_finite_samples() -> None:
    interval = build_interval(0.5, np.array([*np.linspace(0, 1, 41), np.nan, np.inf]))
    assert (interval.low, interval.high) == pytest.approx((0.025, 0.975))
