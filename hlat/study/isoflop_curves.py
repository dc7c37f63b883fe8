"""IsoFLOP curves: loss over parameters at equal compute, with the optimum of each budget.

The second approach of Hoffmann et al. (arXiv 2203.15556, section 3.2): a parabola over log N for
each budget, and a power law through the optima.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.study.lr_optimum import compute_fieller_interval
from hlat.study.power_law import Array
from hlat.study.scaling_fit import CONFIDENCE, Interval
from hlat.study.scaling_points import ScalingPoints, count_distinct

BUDGET_WIDTH = 1.2
"""Ratio of the largest to the smallest compute of a curve. The optimum grows as about C^0.5, so
that it moves by less than 10% within a curve."""
MIN_SIZES = 4
"""Distinct sizes of a curve: a parabola has three constants."""


@dataclass(frozen=True)
class IsoflopCurve:
    """Parabola of the loss over log(N / centre) at one budget.

    Attributes:
        flops: Geometric mean of the compute.
        indices: Points of the curve.
        centre: Geometric mean of the parameters.
        coefficients: Offset, slope and curvature [3].
        parameters: Optimum; NaN if there is none among the sizes.
        tokens: Tokens at the optimum, interpolated over log N.
        loss: Loss at the optimum.
        warning: Reason for which the optimum is missing or uncertain; empty without one.
    """

    flops: float
    indices: NDArray[np.intp]
    centre: float
    coefficients: Array
    parameters: Interval
    tokens: float
    loss: float
    warning: str

    @property
    def has_optimum(self) -> bool:
        """Return True if the optimum and its interval are among the sizes."""
        return not self.warning

    def predict(self, parameters: Array) -> Array:
        """Return the parabola at other sizes."""
        x = np.log(parameters / self.centre)
        return np.asarray(self.coefficients @ np.stack([np.ones_like(x), x, x**2]))


def build_isoflop_curves(points: ScalingPoints) -> list[IsoflopCurve]:
    """Return the curves of all budgets with at least `MIN_SIZES` sizes, in ascending order."""
    return [
        _fit_curve(points, indices)
        for indices in _group_budgets(points.flops)
        if count_distinct(points.parameters[indices]) >= MIN_SIZES
    ]


def fit_exponent(flops: Sequence[float], values: Sequence[float]) -> Interval:
    """Return the exponent of values over compute, with an interval from three values on.

    Raises:
        ValueError: There are fewer than two values.
    """
    from scipy import special

    if len(flops) < 2:
        raise ValueError(f"an exponent needs two values, but {len(flops)} are given")
    x, y = np.log(flops) - np.log(flops).mean(), np.log(values)
    slope = float(x @ y / (x @ x))
    degrees = len(x) - 2
    if degrees == 0:
        return Interval(slope, math.nan, math.nan)
    residuals = y - y.mean() - slope * x
    error = math.sqrt(float(residuals @ residuals) / degrees / float(x @ x))
    margin = float(special.stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error
    return Interval(slope, slope - margin, slope + margin)


def find_frontier(points: ScalingPoints) -> NDArray[np.intp]:
    """Return the points of which no point with at most as much compute has a lower loss."""
    order = np.lexsort((points.losses, points.flops))
    lowest = np.minimum.accumulate(points.losses[order])
    is_new = np.diff(lowest, prepend=math.inf) < 0
    return np.asarray(order[is_new])


def _group_budgets(flops: Array) -> Iterator[NDArray[np.intp]]:
    """Yield the indices of points of about equal compute, from the smallest compute on."""
    remaining = np.argsort(flops, kind="stable")
    while len(remaining):
        is_near = flops[remaining] <= flops[remaining[0]] * BUDGET_WIDTH
        yield remaining[is_near]
        remaining = remaining[~is_near]


def _fit_curve(points: ScalingPoints, indices: NDArray[np.intp]) -> IsoflopCurve:
    logs, losses = np.log(points.parameters[indices]), points.losses[indices]
    centre = float(logs.mean())
    x = logs - centre
    design = np.stack([np.ones_like(x), x, x**2], axis=1)
    coefficients: Array = np.linalg.lstsq(design, losses, rcond=None)[0].astype(np.float64)
    degrees = len(x) - 3
    variance = float(((losses - design @ coefficients) ** 2).sum()) / degrees
    covariance: Array = variance * np.linalg.inv(design.T @ design)[1:, 1:].astype(np.float64)
    low, high = compute_fieller_interval(coefficients, covariance, degrees, CONFIDENCE)
    offset, slope, curvature = coefficients
    vertex = -slope / (2 * curvature)
    warning = _find_problem(x, losses, float(curvature), float(vertex), (low, high))
    flops, missing = float(np.exp(np.log(points.flops[indices]).mean())), math.nan
    if curvature <= 0 or not x.min() < vertex < x.max():
        none = Interval(missing, missing, missing)
        return IsoflopCurve(
            flops, indices, math.exp(centre), coefficients, none, missing, missing, warning
        )
    with np.errstate(over="ignore"):
        ends = np.exp(centre + np.array([vertex, low, high])).tolist()
    order = np.argsort(x)
    log_tokens = np.interp(vertex, x[order], np.log(points.tokens[indices])[order])
    loss = float(offset + slope * vertex + curvature * vertex**2)
    return IsoflopCurve(
        flops,
        indices,
        math.exp(centre),
        coefficients,
        Interval(*ends),
        math.exp(log_tokens),
        loss,
        warning,
    )


def _find_problem(
    x: Array, losses: Array, curvature: float, vertex: float, interval: tuple[float, float]
) -> str:
    """Return the reason for which an optimum is missing or uncertain; empty without one."""
    if curvature <= 0:
        return "the parabola has no minimum"
    if not x.min() < vertex < x.max():
        side = "smallest" if vertex <= x.min() else "largest"
        return f"the optimum is beyond the {side} size; add sizes there"
    best = x[losses.argmin()]
    if best in (x.min(), x.max()):
        return "the lowest loss is that of the smallest or largest size; add sizes there"
    if not x.min() <= interval[0] <= interval[1] <= x.max():
        return "the interval of the optimum exceeds the sizes"
    return ""
