"""IsoFLOP curves: optima of known parabolas and laws, edges, exponents and the frontier."""

import math

import numpy as np
import pytest
from scipy import stats

from hlat.study.isoflop_curves import build_isoflop_curves, find_frontier, fit_exponent
from hlat.study.power_law import Array
from hlat.study.scaling_points import ScalingPoints
from tests.unit.study.scaling_data import CONSTANTS, compute_losses


def build_points(parameters: Array, flops: Array, losses: Array) -> ScalingPoints:
    names = [str(i) for i in range(len(losses))]
    tokens = flops / (6 * parameters)
    return ScalingPoints("test", "loss", names, parameters, tokens, flops, losses, names)


def build_parabola(best: float, sizes: Array, std: float = 0.0) -> ScalingPoints:
    errors = np.random.default_rng(0).normal(0, std, len(sizes))
    losses = 2.5 + 0.05 * np.log(sizes / best) ** 2 + errors
    return build_points(sizes, np.full(len(sizes), 6e18), losses)


def test_optimum_of_an_exact_parabola_is_found() -> None:
    sizes = np.geomspace(1e8, 1e9, 6)
    (curve,) = build_isoflop_curves(build_parabola(3e8, sizes))
    assert curve.parameters.value == pytest.approx(3e8)
    assert curve.loss == pytest.approx(2.5)
    assert curve.tokens == pytest.approx(1e18 / 3e8)
    assert curve.parameters.high / curve.parameters.low == pytest.approx(1, abs=1e-5)
    assert curve.warning == ""
    np.testing.assert_allclose(curve.predict(sizes), build_parabola(3e8, sizes).losses)


def test_interval_covers_the_optimum() -> None:
    """Require at least 91% of 400 samples, which 95% coverage exceeds with 99.9% (binomial)."""
    sizes, covered = np.geomspace(1e8, 1e9, 6), 0
    generator = np.random.default_rng(0)
    for _ in range(400):
        points = build_parabola(3e8, sizes)
        noisy = points.losses + generator.normal(0, 0.002, len(sizes))
        (curve,) = build_isoflop_curves(build_points(sizes, points.flops, noisy))
        covered += curve.parameters.low <= 3e8 <= curve.parameters.high
    assert 364 <= covered < 400


@pytest.mark.parametrize(
    ("best", "message"),
    [
        (5e7, "beyond the smallest size; add sizes there"),
        (3e9, "beyond the largest size; add sizes there"),
        (1.05e8, "lowest loss is that of the smallest or largest size"),
    ],
)
def test_optima_at_the_edge_have_a_warning(best: float, message: str) -> None:
    (curve,) = build_isoflop_curves(build_parabola(best, np.geomspace(1e8, 1e9, 6)))
    assert message in curve.warning
    assert not curve.has_optimum
    assert math.isfinite(curve.parameters.value) == (1e8 < best < 1e9)


def test_parabola_without_minimum_has_a_warning() -> None:
    points = build_parabola(3e8, np.geomspace(1e8, 1e9, 6))
    (curve,) = build_isoflop_curves(
        build_points(points.parameters, points.flops, 5 - points.losses)
    )
    assert curve.warning == "the parabola has no minimum"
    assert math.isnan(curve.parameters.value)


def test_points_of_about_equal_compute_share_a_curve() -> None:
    """Budgets of a law: optima and exponents approach those of the law (equation 4)."""
    alpha, beta = CONSTANTS["alpha"], CONSTANTS["beta"]
    gain = (alpha * CONSTANTS["A"] / (beta * CONSTANTS["B"])) ** (1 / (alpha + beta))
    budgets = [1e19, 1e20, 1e21]
    columns = []
    for budget in budgets:
        best = gain * (budget / 6) ** (beta / (alpha + beta))
        sizes = best * np.geomspace(0.5, 2, 7)
        flops = budget * np.linspace(0.97, 1.03, 7)
        columns.append((sizes, flops, compute_losses(np.stack([sizes, flops / (6 * sizes)]))))
    parameters, flops, losses = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    curves = build_isoflop_curves(build_points(parameters, flops, losses))
    assert [round(math.log10(curve.flops)) for curve in curves] == [19, 20, 21]
    exponent = fit_exponent(budgets, [curve.parameters.value for curve in curves])
    assert exponent.value == pytest.approx(beta / (alpha + beta), abs=0.01)


def test_few_sizes_are_no_curve() -> None:
    assert not build_isoflop_curves(build_parabola(3e8, np.geomspace(1e8, 1e9, 3)))


def test_exponent_has_the_interval_of_linear_regression() -> None:
    flops, values = [1e18, 1e19, 1e20, 1e21], [1.0, 3.5, 9.0, 33.0]
    exponent = fit_exponent(flops, values)
    expected = stats.linregress(np.log(flops), np.log(values))
    margin = stats.t.ppf(0.975, 2) * expected.stderr
    assert exponent.value == pytest.approx(expected.slope)
    assert exponent.high - exponent.value == pytest.approx(margin)
    assert math.isnan(fit_exponent(flops[:2], values[:2]).low)
    with pytest.raises(ValueError, match="needs two values, but 1 are given"):
        fit_exponent(flops[:1], values[:1])


def test_frontier_has_the_lowest_loss_up_to_its_compute() -> None:
    flops = np.array([4.0, 1.0, 2.0, 2.0, 3.0])
    losses = np.array([1.0, 3.0, 2.0, 2.5, 2.0])
    frontier = find_frontier(build_points(np.ones(5), flops, losses))
    assert frontier.tolist() == [1, 2, 0]
