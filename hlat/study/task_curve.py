"""Accuracy of a task over loss, the second step of a prediction of accuracy.

Accuracy = floor + gain / (1 + exp(slope (L - middle))), as Bhagia et al. (arXiv 2412.04403). The
first step is the law of the loss; both are fitted to the same bootstrap samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.study.power_law import Array, sample_weights
from hlat.study.scaling_fit import FitSettings, Interval, build_interval
from hlat.study.scaling_points import ScalingPoints

CONSTANTS = ("floor", "gain", "slope", "middle")
MIN_TASK_POINTS = 6
_START_SLOPES = (2.0, 5.0, 15.0)
"""Slopes of the starts, times the range of the losses: from almost linear to a step."""


@dataclass(frozen=True)
class TaskCurve:
    """Accuracy over loss.

    Attributes:
        name: Column of the accuracy.
        constants: Values of `CONSTANTS` [4].
        samples: The same of each bootstrap sample [samples, 4].
    """

    name: str
    constants: Array
    samples: Array

    @property
    def intervals(self) -> dict[str, Interval]:
        """Constants by name."""
        pairs = zip(CONSTANTS, self.constants, self.samples.T, strict=True)
        return {name: build_interval(value, samples) for name, value, samples in pairs}

    def predict(self, loss: float, losses: Array) -> Interval:
        """Return the accuracy at a loss, with the loss of each bootstrap sample [samples]."""
        value = _compute_accuracy(np.array([loss]), *self.constants)[0]
        return build_interval(value, _compute_accuracy(losses, *self.samples.T))


def fit_task_curve(points: ScalingPoints, settings: FitSettings) -> TaskCurve | None:
    """Return the curve of accuracy over loss by least squares; None without accuracies.

    Raises:
        ConfigError: There are too few points.
    """
    accuracies = points.accuracies
    if accuracies is None:
        return None
    name = points.accuracy_name
    if len(points) < MIN_TASK_POINTS:
        raise ConfigError(
            f"accuracy={name}: {points.source} has {len(points)} points, and the curve has 4 "
            f"constants; give at least {MIN_TASK_POINTS} points"
        )
    starts = [*_build_starts(points.losses, accuracies)]
    constants = _fit(points.losses, accuracies, np.ones(len(points)), starts)
    weights = sample_weights(points.groups, settings.num_samples, settings.seed)
    samples = [_fit(points.losses, accuracies, each, [constants]) for each in weights]
    return TaskCurve(name, constants, np.stack(samples))


def _compute_accuracy(
    losses: Array, floor: Array, gain: Array, slope: Array, middle: Array
) -> Array:
    from scipy import special

    return np.asarray(floor + gain * special.expit(-slope * (losses - middle)))


def _build_starts(losses: Array, accuracies: Array) -> Iterator[Array]:
    low, high = accuracies.min(), accuracies.max()
    width = losses.max() - losses.min()
    for factor in _START_SLOPES:
        yield np.array([low, high - low, factor / width, np.median(losses)])


def _fit(losses: Array, accuracies: Array, weights: Array, starts: Sequence[Array]) -> Array:
    """Return the constants with the least squares, weighted, from several starts."""
    from scipy import optimize

    roots = np.sqrt(weights)

    def compute_residuals(constants: Array) -> Array:
        return np.asarray(roots * (_compute_accuracy(losses, *constants) - accuracies))

    bounds = ([0.0, 0.0, 0.0, 0.0], np.inf)
    ends = [
        optimize.least_squares(
            compute_residuals, start, bounds=bounds, x_scale=np.abs(start) + 1e-9
        )
        for start in starts
    ]
    return np.asarray(min(ends, key=lambda end: end.cost).x)
