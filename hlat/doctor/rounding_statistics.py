"""Statistics of stochastic rounding to bf16, given exact values.

An exact value between two neighbors in bf16 is rounded away from zero with the probability f of its
fraction of the spacing. The residual (rounded up - f) / sqrt(f (1 - f)) has mean 0 and variance 1,
and residuals of different elements, tensors and steps are independent. The mean of n products of
pairs then has a standard deviation of 1 / sqrt(n).
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_MIN_VARIANCE = 0.02
"""Minimum of f (1 - f): residuals of values close to a neighbor are rare and large."""


def compute_spacing(values: Array) -> Array:
    """Return the distance between neighbors in bf16, which has seven stored mantissa bits."""
    magnitude = np.maximum(np.abs(values), 2.0**-126)
    spacing: Array = np.exp2(np.floor(np.log2(magnitude)) - 7)
    return spacing


def compute_residuals(exact: Array, rounded: Array) -> Array:
    """Return the residual of each rounded magnitude; NaN where the exact value is near bf16's."""
    spacing = compute_spacing(exact)
    fraction = np.abs(exact) / spacing % 1
    variance = fraction * (1 - fraction)
    variance[variance < _MIN_VARIANCE] = np.nan
    residuals: Array = (np.abs(rounded) - np.abs(exact)) / spacing / np.sqrt(variance)
    return residuals


def compute_mean(residuals: Array) -> tuple[float, float]:
    """Return the mean of the residuals, and its standard deviation for unbiased rounding."""
    count = max(1, int(np.isfinite(residuals).sum()))
    return float(np.nansum(residuals) / count), 1 / float(np.sqrt(count))


def sum_pairs(residuals: Array, axis: int) -> tuple[float, float]:
    """Return the sum of the products of all pairs along an axis, and the number of pairs."""
    squares = np.nansum(np.square(residuals), axis)
    products = np.square(np.nansum(residuals, axis)) - squares
    counts = np.isfinite(residuals).sum(axis).astype(np.float64)
    return float(products.sum() / 2), float((counts * (counts - 1) / 2).sum())
