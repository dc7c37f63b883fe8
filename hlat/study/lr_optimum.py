"""Best learning rate of a grid: vertex of a parabola over the logarithm of the rate, with interval.

The runs of a seed share initial weights and data order, so each seed has a separate offset. The
optimum is the ratio of two coefficients; its interval is Fieller's (1954, "Some problems in
interval estimation", JRSS B 16), which is exact for independent Gaussian errors of the runs.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

_WINDOW_OCTAVES = 2.0
"""Largest distance, in log2, of a fitted rate from the one with the lowest mean."""
_ROUNDING = 0.01
"""Error of log2 of rates with four significant digits, and of factors such as 1.4142."""


class OptimumStatus(Enum):
    """Results of the search for an optimum."""

    found = "found"
    """The grid contains the optimum."""
    below = "below the grid"
    """The lowest rate is the best."""
    above = "above the grid"
    """The highest rate is the best."""
    unstable = "at the edge of divergence"
    """The best rate is the highest with which no run diverged."""
    not_convex = "not convex"
    """The curvature is not significantly positive, or the vertex is not among the fitted rates."""
    incomplete = "incomplete"
    """Fewer than three rates or no seed have all their runs."""


@dataclass(frozen=True)
class LrCurve:
    """Metrics of one seed per row and one rate per column, where lower is better.

    `rates` [rates] are in ascending order. `values` [seeds, rates] are NaN if a run has not
    finished. `num_diverged` [rates] are the numbers of diverged runs.
    """

    rates: NDArray[np.float64]
    values: NDArray[np.float64]
    num_diverged: NDArray[np.int64]


@dataclass(frozen=True)
class LrOptimum:
    """Optimum of a curve; numbers that do not exist are NaN.

    Attributes:
        status: Result of the search.
        center: Rate with the lowest mean; NaN if incomplete.
        num_seeds: Seeds with all runs.
        degrees: Degrees of freedom of the residuals.
        fitted: Rates that the parabola was fitted to [n].
        coefficients: Offset, slope and curvature of the metric over log2(rate / `center`) [3].
        covariance: Covariance of slope and curvature [2, 2].
        rate: Best learning rate; NaN unless the status is `found`.
        low: Lower end of the interval of the rate.
        high: Upper end.
        value: Metric at the optimum, mean over seeds.
    """

    status: OptimumStatus
    center: float
    num_seeds: int
    degrees: int
    fitted: NDArray[np.float64]
    coefficients: NDArray[np.float64]
    covariance: NDArray[np.float64]
    rate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    value: float = math.nan

    def predict(self, rates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the parabola at other rates."""
        x = np.log2(rates / self.center)
        return np.asarray(self.coefficients @ np.stack([np.ones_like(x), x, x**2]))


def find_lr_optimum(curve: LrCurve, confidence: float = 0.95) -> LrOptimum:
    """Return the optimum of a curve.

    Rates with a diverged run are excluded, because a parabola does not describe them, and seeds
    without all other runs. The parabola is fitted to the rate with the lowest mean, both of its
    neighbours, and all rates within two octaves. If that rate is the first or the last one, there
    is no optimum.
    """
    stable = curve.num_diverged == 0
    rates, values = curve.rates[stable], curve.values[:, stable]
    values = values[np.isfinite(values).all(axis=1)]
    if len(rates) < 3 or not len(values):
        return _build_missing(OptimumStatus.incomplete, math.nan, len(values))
    best = int(values.mean(axis=0).argmin())
    if best == 0:
        return _build_missing(OptimumStatus.below, rates[0], len(values))
    if best == len(rates) - 1:
        diverges_above = bool((~stable & (curve.rates > rates[-1])).any())
        status = OptimumStatus.unstable if diverges_above else OptimumStatus.above
        return _build_missing(status, rates[-1], len(values))
    window = np.abs(np.log2(rates / rates[best])) <= _WINDOW_OCTAVES + _ROUNDING
    window[best - 1 : best + 2] = True
    return _fit_parabola(rates[window], values[:, window], float(rates[best]), confidence)


def sample_lr_optima(
    optimum: LrOptimum, num_samples: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return log2 of optima [samples] of parabolas from the distribution of the fitted one.

    Slope and curvature are sampled from a Gaussian with the fitted covariance, with a scale sampled
    from that of the residuals (parametric bootstrap with unknown variance). A sample without a
    minimum is infinite, on the side to which the parabola falls.
    """
    if not np.isfinite(optimum.covariance).all():
        return np.full(num_samples, math.nan)
    scale = np.sqrt(optimum.degrees / generator.chisquare(optimum.degrees, num_samples))
    mean = optimum.coefficients[1:]
    noise = generator.multivariate_normal(np.zeros(2), optimum.covariance, num_samples)
    slopes, curvatures = (mean + noise * scale[:, None]).T
    with np.errstate(divide="ignore", invalid="ignore"):
        offsets = -slopes / (2 * curvatures)
    offsets = np.where(curvatures > 0, offsets, -np.sign(slopes) * math.inf)
    return np.asarray(math.log2(optimum.center) + offsets)


def _fit_parabola(
    rates: NDArray[np.float64], values: NDArray[np.float64], center: float, confidence: float
) -> LrOptimum:
    """Return the vertex of the least-squares parabola with one offset per seed."""
    num_seeds, num_rates = values.shape
    x = np.log2(rates / center)
    design = np.stack([x - x.mean(), x**2 - (x**2).mean()], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    mean = values.mean(axis=0)
    slope, curvature = inverse @ design.T @ (mean - mean.mean())
    offset = mean.mean() - slope * x.mean() - curvature * (x**2).mean()
    residuals = values - values.mean(axis=1, keepdims=True) - design @ [slope, curvature]
    degrees = num_seeds * num_rates - num_seeds - 2
    variance = float((residuals**2).sum()) / degrees if degrees > 0 else math.nan
    covariance = variance * inverse / num_seeds
    coefficients = np.array([offset, slope, curvature])
    status = OptimumStatus.not_convex
    fit = LrOptimum(status, center, num_seeds, degrees, rates, coefficients, covariance)
    return _locate_vertex(fit, x, confidence)


def _locate_vertex(fit: LrOptimum, x: NDArray[np.float64], confidence: float) -> LrOptimum:
    """Return the fit with its vertex and interval, or the reason why it has none."""
    offset, slope, curvature = fit.coefficients
    low, high = compute_fieller_interval(fit.coefficients, fit.covariance, fit.degrees, confidence)
    if curvature <= 0 or math.isinf(low):
        return fit
    vertex = -slope / (2 * curvature)
    if not x[0] <= vertex <= x[-1]:
        return fit
    rate, lower, upper = (float(fit.center * 2**position) for position in (vertex, low, high))
    value = float(offset + slope * vertex + curvature * vertex**2)
    return replace(fit, status=OptimumStatus.found, rate=rate, low=lower, high=upper, value=value)


def compute_fieller_interval(
    coefficients: NDArray[np.float64],
    covariance: NDArray[np.float64],
    degrees: int,
    confidence: float,
) -> tuple[float, float]:
    """Return the positions v at which slope + 2 v curvature does not differ from zero.

    The interval is unbounded if the curvature does not differ from zero, and NaN without residuals.

    Args:
        coefficients: Offset, slope and curvature of a parabola [3].
        covariance: Covariance of slope and curvature [2, 2].
        degrees: Degrees of freedom of the residuals.
        confidence: Coverage of the interval.
    """
    from scipy import special

    if not np.isfinite(covariance).all():
        return math.nan, math.nan
    _, slope, curvature = coefficients
    (var_slope, between), (_, var_curvature) = covariance
    t2 = float(special.stdtrit(degrees, (1 + confidence) / 2)) ** 2
    square = 4 * (curvature**2 - t2 * var_curvature)
    linear = 4 * (slope * curvature - t2 * between)
    constant = slope**2 - t2 * var_slope
    if square <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(0.0, linear**2 - 4 * square * constant))
    return (-linear - root) / (2 * square), (-linear + root) / (2 * square)


def _build_missing(status: OptimumStatus, center: float, num_seeds: int) -> LrOptimum:
    missing = np.full(3, math.nan)
    none = np.array([], dtype=np.float64)
    return LrOptimum(status, float(center), num_seeds, 0, none, missing, np.full((2, 2), math.nan))
