"""Movement of the best learning rate over a size, such as the width of a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hlat.study.lr_optimum import LrOptimum, sample_lr_optima

_NUM_SAMPLES = 10_000
_GROWTH = 8.0
"""Factor of the size over which the movement is stated."""


@dataclass(frozen=True)
class LrMovement:
    """Movement when the size grows by a factor of 8, in steps of the grid, with its interval.

    `exponent` is the slope of log(best rate) over log(size): -1 if the rate is inverse to the size.
    """

    steps: float
    low: float
    high: float
    exponent: float


def compute_movement(
    scales: Sequence[float],
    optima: Sequence[LrOptimum],
    factor: float,
    confidence: float = 0.95,
    seed: int = 0,
) -> LrMovement | None:
    """Return the movement of optima with the status `found`; None for fewer than two sizes.

    The slope is that of least squares. Its interval contains the quantiles of the slopes of 10,000
    samples of all optima (`sample_lr_optima`), so it has the errors of the runs, but not the
    deviation of the optima from a line. It is NaN if the optima have no interval.
    """
    if len({*scales}) < 2:
        return None
    x = np.log2(scales)
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    slope = float(weights @ np.log2([one.rate for one in optima]))
    generator = np.random.default_rng(seed)
    samples = np.array([sample_lr_optima(one, _NUM_SAMPLES, generator) for one in optima])
    with np.errstate(invalid="ignore"):
        slopes = weights @ samples
    slopes = slopes[~np.isnan(slopes)]
    steps_per_slope = math.log2(_GROWTH) / math.log2(factor)
    tail = (1 - confidence) / 2
    low, high = (
        np.quantile(slopes, [tail, 1 - tail], method="nearest")
        if len(slopes)
        else (math.nan, math.nan)
    )
    return LrMovement(
        slope * steps_per_slope, float(low) * steps_per_slope, float(high) * steps_per_slope, slope
    )
