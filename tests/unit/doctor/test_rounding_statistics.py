"""Residuals of stochastic rounding have mean 0, variance 1, and are correlated for shared bits."""

import numpy as np
import pytest
import torch

from hlat.doctor import rounding_statistics

STEPS, ROWS, COLUMNS = 4, 64, 48


def round_stochastically(exact, uniform):
    """Return neighbors in bf16, away from zero where the uniform number is below the fraction."""
    spacing = rounding_statistics.compute_spacing(exact)
    magnitude = np.abs(exact) / spacing
    return np.sign(exact) * (np.floor(magnitude) + (uniform < magnitude % 1)) * spacing


@pytest.fixture
def exact():
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS))
    return np.broadcast_to(values, (STEPS, ROWS, COLUMNS))


def test_spacing_is_that_of_torch() -> None:
    values = torch.tensor([1.0, 1.5, -0.3, 2.0**-100, 3e38]).bfloat16()
    neighbors = (values.view(torch.int16) + 1).view(torch.bfloat16)
    expected = (neighbors.double() - values.double()).abs().numpy()
    assert np.array_equal(rounding_statistics.compute_spacing(values.double().numpy()), expected)


def test_independent_rounding_has_no_drift_and_no_correlation(exact) -> None:
    uniform = np.random.default_rng(1).random(exact.shape)
    rounded = round_stochastically(exact, uniform)
    residuals = rounding_statistics.compute_residuals(exact, rounded)
    mean, deviation = rounding_statistics.compute_mean(residuals)
    assert abs(mean) < 4 * deviation
    assert np.nanvar(residuals) == pytest.approx(1, abs=0.05)
    for axis in range(3):
        products, num_pairs = rounding_statistics.sum_pairs(residuals, axis)
        assert abs(products) < 4 * np.sqrt(num_pairs), axis


@pytest.mark.parametrize(
    ("axis", "shape"),
    [(0, (1, ROWS, COLUMNS)), (1, (STEPS, 1, COLUMNS)), (2, (STEPS, ROWS, 1))],
)
def test_shared_numbers_are_correlated_along_their_axis(exact, axis, shape) -> None:
    uniform = np.broadcast_to(np.random.default_rng(1).random(shape), exact.shape)
    residuals = rounding_statistics.compute_residuals(exact, round_stochastically(exact, uniform))
    for other in range(3):
        products, num_pairs = rounding_statistics.sum_pairs(residuals, other)
        assert (products > 20 * np.sqrt(num_pairs)) == (other == axis), other


def test_rounding_to_nearest_drifts_for_equal_fractions() -> None:
    exact = np.full(1000, 1 + 0.4 * 2.0**-7)
    nearest = torch.from_numpy(exact).bfloat16().double().numpy()
    residuals = rounding_statistics.compute_residuals(exact, nearest)
    mean, deviation = rounding_statistics.compute_mean(residuals)
    assert mean < -20 * deviation
