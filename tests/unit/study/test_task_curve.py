"""Accuracy over loss: known sigmoids, an independent fit, intervals and missing accuracies."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize

from hlat.config.config_errors import ConfigError
from hlat.study.power_law import Array
from hlat.study.scaling_fit import FitSettings
from hlat.study.scaling_points import ScalingPoints
from hlat.study.task_curve import TaskCurve, fit_task_curve

LOSSES = np.linspace(2.0, 3.2, 24)
CONSTANTS = (25.0, 60.0, 6.0, 2.5)


def compute_accuracies(losses: Array, constants: tuple[float, ...] = CONSTANTS) -> Array:
    floor, gain, slope, middle = constants
    return np.asarray(floor + gain / (1 + np.exp(slope * (losses - middle))))


def build_points(accuracies: Array | None) -> ScalingPoints:
    names = [str(i) for i in range(len(LOSSES))]
    ones = np.ones(len(LOSSES))
    points = ScalingPoints("test", "loss", names, ones, ones, ones, LOSSES, names)
    return replace(points, accuracies=accuracies, accuracy_name="piqa")


def fit(accuracies: Array, num_samples: int = 50) -> TaskCurve:
    curve = fit_task_curve(build_points(accuracies), FitSettings(num_samples=num_samples))
    assert curve is not None
    return curve


def test_constants_of_exact_accuracies_are_found() -> None:
    curve = fit(compute_accuracies(LOSSES), 3)
    np.testing.assert_allclose(curve.constants, CONSTANTS, rtol=1e-4)
    accuracy = curve.predict(2.2, np.full(3, 2.2))
    expected = float(compute_accuracies(np.array(2.2)))
    assert (accuracy.value, accuracy.low, accuracy.high) == pytest.approx([expected] * 3, rel=1e-4)


def test_fit_is_that_of_curve_fit() -> None:
    noise = np.random.default_rng(0).normal(0, 1, len(LOSSES))
    accuracies = compute_accuracies(LOSSES) + noise
    other, _ = optimize.curve_fit(
        lambda x, *constants: compute_accuracies(x, constants), LOSSES, accuracies, CONSTANTS
    )
    np.testing.assert_allclose(fit(accuracies).constants, other, rtol=1e-3)


@pytest.mark.slow
def test_interval_contains_the_accuracy() -> None:
    """Require 18 of 20 data sets; with 95% coverage, fewer have a probability of 8%."""
    truth, count = float(compute_accuracies(np.array(2.1))), 0
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 1, len(LOSSES))
        curve = fit(compute_accuracies(LOSSES) + noise)
        accuracy = curve.predict(2.1, np.full(50, 2.1))
        count += accuracy.low <= truth <= accuracy.high
    assert count >= 18


def test_points_without_accuracy_have_no_curve() -> None:
    assert fit_task_curve(build_points(None), FitSettings()) is None


def test_few_points_are_an_error() -> None:
    points = build_points(compute_accuracies(LOSSES))
    chosen = np.arange(len(LOSSES)) < 5
    with pytest.raises(ConfigError, match="accuracy=piqa: test has 5 points, and the curve has 4"):
        fit_task_curve(points.select(chosen), FitSettings())
