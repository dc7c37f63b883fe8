"""Sums of power laws with an irreducible term: L = E + sum over k of A_k / x_k^alpha_k.

With parameters and tokens as x, this is the third approach of Hoffmann et al. (arXiv 2203.15556,
section 3.3): the sum over points of the Huber loss, with delta 1e-3, of log L. A mean over points
with the usual tolerances of an optimizer stops before the minimum (Besiroglu et al., arXiv
2404.10102), so the gradient is compared with that of a single point.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError

DELTA = 1e-3
"""Threshold of the Huber loss (arXiv 2203.15556, section D.2)."""
_START_EXPONENTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.9, 1.4)
"""Exponents of the starts; published ones lie between 0.05 (arXiv 2001.08361) and 0.5."""
_NUM_STARTS = 16
"""Best starts of the grid, from which the optimizer starts."""
_MIN_START_TERM = 1e-3
"""Smallest term of a start as a fraction of the mean loss, as its logarithm must be finite."""
MIN_TERM = 0.05
"""The same for a bootstrap sample, and fraction below which E is not identified."""
_GRADIENT_TOLERANCE = 1e-6
"""Norm of the gradient at the minimum; that of a point with a large residual is about 1."""
_MAX_ITERATIONS = 500
_MAX_NEAR_ITERATIONS = 100
"""Iterations from the minimum of all points; 60 samples each of three data sets needed up to 44. A
sample that does not identify the law ends in a flat valley instead, which takes thousands."""
_NEAR_RADIUS = 0.01
"""First step of a bootstrap sample, of the order of the standard deviation of an exponent. With 64
points, a sample needs a third fewer iterations than with a radius of 1."""
_MAX_MINIMA = 2
"""Minima from which a bootstrap sample starts."""
_SAME_MINIMUM = 1e-6
"""Relative difference of the objectives of starts that end at the same minimum."""
_SAME_VALLEY = 1e-2
"""Relative difference up to which bootstrap samples do not start from both ends."""

Array = NDArray[np.float64]


class Objective(Enum):
    """Objectives of a fit, both of which Besiroglu et al. publish."""

    huber = "huber"
    """Huber loss of the residuals of log L."""
    likelihood = "likelihood"
    """Density proportional to exp(-Huber loss of residual / scale), with free scale."""


@dataclass(frozen=True)
class PowerLaw:
    """Constants of one law, or of several with the same leading dimensions.

    Attributes:
        irreducible: E [...].
        coefficients: A [..., inputs].
        exponents: alpha [..., inputs].
    """

    irreducible: Array
    coefficients: Array
    exponents: Array

    def predict(self, inputs: Array) -> Array:
        """Return the losses [..., points] at `inputs` [inputs, points]."""
        terms = self.coefficients[..., None] * inputs ** -self.exponents[..., None]
        return np.asarray(self.irreducible[..., None] + terms.sum(-2))


@dataclass(frozen=True)
class PowerLawFit:
    """Minimum of an objective.

    Attributes:
        law: Fitted constants.
        objective: Value of the objective, summed over points.
        num_starts: Starts of the optimizer.
        num_converged: Starts that ended at this minimum.
        minima: Distinct minima, best first, as constants of the logarithmic form.
    """

    law: PowerLaw
    objective: float
    num_starts: int
    num_converged: int
    minima: tuple[Array, ...]


@dataclass(frozen=True)
class LogProblem:
    """Huber regression of log losses on centred logarithms of the inputs.

    The constants [1 + 2 inputs] are log E, log A_k at the centre, and alpha_k. At the centre, the
    terms are comparable with the loss, so that the problem is well conditioned.

    Attributes:
        logs: Centred logarithms of the inputs [inputs, points].
        targets: Logarithms of the losses [points].
        centres: Mean logarithm of each input [inputs].
        weights: Number of times that a point counts [points].
        threshold: Residual above which the loss is linear.
    """

    logs: Array
    targets: Array
    centres: Array
    weights: Array
    threshold: float = DELTA

    def compute_residuals(self, constants: Array) -> Array:
        """Return the logarithm of the predicted losses minus that of the losses [points]."""
        return self._compute_shares(constants)[1] - self.targets

    def compute_value_and_gradient(self, constants: Array) -> tuple[float, Array]:
        """Return the Huber loss divided by the threshold, and its gradient."""
        shares, predicted = self._compute_shares(constants)
        scaled = (predicted - self.targets) / self.threshold
        clipped = np.clip(scaled, -1, 1)
        value = float(self.weights @ (clipped * (scaled - clipped / 2))) * self.threshold
        return value, self._build_jacobian(shares) @ (self.weights * clipped)

    def compute_hessian(self, constants: Array) -> Array:
        """Return the second derivatives of the value."""
        shares, predicted = self._compute_shares(constants)
        scaled = (predicted - self.targets) / self.threshold
        slopes = self.weights * np.clip(scaled, -1, 1)
        curvatures = self.weights * (np.abs(scaled) < 1) / self.threshold
        jacobian = self._build_jacobian(shares)
        hessian = (jacobian * (curvatures - slopes)) @ jacobian.T
        # Second derivative of log-sum-exp: diag(shares) - shares shares^T, over its terms
        first, rest = slopes * shares[0], slopes * shares[1:]
        offsets = np.arange(1, 1 + len(self.logs))
        exponents = offsets + len(self.logs)
        hessian[0, 0] += first.sum()
        hessian[offsets, offsets] += rest.sum(1)
        hessian[exponents, exponents] += (rest * self.logs**2).sum(1)
        mixed = (rest * self.logs).sum(1)
        hessian[offsets, exponents] -= mixed
        hessian[exponents, offsets] -= mixed
        return np.asarray(hessian)

    def convert_to_law(self, constants: Array) -> PowerLaw:
        """Return the law with the constants [..., 1 + 2 inputs]."""
        num_inputs = len(self.logs)
        offsets, exponents = constants[..., 1 : 1 + num_inputs], constants[..., 1 + num_inputs :]
        with np.errstate(over="ignore"):
            coefficients = np.exp(offsets + exponents * self.centres)
        return PowerLaw(np.exp(constants[..., 0]), coefficients, exponents)

    def _compute_shares(self, constants: Array) -> tuple[Array, Array]:
        """Return the share of each term in the predicted losses, and their logarithm."""
        num_inputs = len(self.logs)
        offsets, exponents = constants[1 : 1 + num_inputs], constants[1 + num_inputs :]
        terms = np.empty((1 + num_inputs, len(self.targets)))
        terms[0] = constants[0]
        terms[1:] = offsets[:, None] - exponents[:, None] * self.logs
        largest = terms.max(0)
        powers = np.exp(terms - largest)
        total = powers.sum(0)
        return powers / total, largest + np.log(total)

    def _build_jacobian(self, shares: Array) -> Array:
        """Return the derivatives of the log predictions [constants, points]."""
        return np.concatenate([shares, -shares[1:] * self.logs])


def build_problem(inputs: Array, losses: Array, threshold: float = DELTA) -> LogProblem:
    """Return the regression of losses [points] on inputs [inputs, points]."""
    logs = np.log(inputs)
    centres = logs.mean(1)
    weights = np.ones(len(losses))
    return LogProblem(logs - centres[:, None], np.log(losses), centres, weights, threshold)


def fit_power_law(
    inputs: Array, losses: Array, objective: Objective = Objective.huber
) -> PowerLawFit:
    """Return the law that minimizes an objective, from a grid of starts.

    Args:
        inputs: Positive inputs [inputs, points], such as parameters and tokens.
        losses: Positive losses [points].
        objective: Loss over residuals.

    Raises:
        ConfigError: No start converges.
    """
    problem = build_problem(inputs, losses)
    starts = _build_starts(problem)
    ends = sorted((minimize(problem, start) for start in starts), key=lambda end: end[1])
    ends = [end for end in ends if math.isfinite(end[1])]
    if not ends:
        raise ConfigError(f"no fit of {len(losses)} points converges; check their units")
    best = ends[0][1]
    minima = _list_minima(ends)
    num_converged = sum(value <= best * (1 + _SAME_MINIMUM) for _, value in ends)
    constants, total = minima[0], best * DELTA
    if objective is Objective.likelihood:
        constants, total = _maximize_likelihood(problem, minima)
    law = problem.convert_to_law(constants)
    return PowerLawFit(law, total, len(starts), num_converged, minima)


def sample_weights(groups: Sequence[str], num_samples: int, seed: int) -> Array:
    """Return how often each point is in each resample of whole groups [samples, points]."""
    _, members = np.unique(groups, return_inverse=True)
    num_groups = int(members.max()) + 1
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(num_groups, np.full(num_groups, 1 / num_groups), num_samples)
    return np.asarray(counts[:, members], np.float64)


def minimize(problem: LogProblem, start: Array, is_near: bool = False) -> tuple[Array, float]:
    """Return the constants at the end of the optimizer, and the value there.

    Args:
        problem: Regression.
        start: Constants at which the optimizer starts.
        is_near: Start at the minimum of similar points, with short steps.
    """
    from scipy import optimize

    with np.errstate(over="ignore", invalid="ignore"):
        result = optimize.minimize(
            problem.compute_value_and_gradient,
            start,
            method="trust-exact",
            jac=True,
            hess=problem.compute_hessian,
            options={
                "gtol": _GRADIENT_TOLERANCE,
                "maxiter": _MAX_NEAR_ITERATIONS if is_near else _MAX_ITERATIONS,
                "initial_trust_radius": _NEAR_RADIUS if is_near else 1.0,
            },
        )
    return result.x, float(result.fun)


def _build_starts(problem: LogProblem) -> list[Array]:
    """Return the best constants among those with each combination of exponents.

    With fixed exponents, the law is linear in E and A_k, which are the non-negative least-squares
    solution of the relative residuals.
    """
    from scipy import optimize

    losses, starts = np.exp(problem.targets), []
    for exponents in product(_START_EXPONENTS, repeat=len(problem.logs)):
        terms = np.exp(-np.array(exponents)[:, None] * problem.logs)
        design = np.concatenate([np.ones((1, len(losses))), terms]) / losses
        factors, _ = optimize.nnls(design.T, np.ones(len(losses)))
        factors = np.maximum(factors, _MIN_START_TERM * losses.mean())
        starts.append(np.concatenate([np.log(factors), exponents]))
    starts.sort(key=lambda start: problem.compute_value_and_gradient(start)[0])
    return starts[:_NUM_STARTS]


def _list_minima(ends: Sequence[tuple[Array, float]]) -> tuple[Array, ...]:
    """Return the constants of each distinct value of sorted ends, at most `_MAX_MINIMA`."""
    minima: list[tuple[Array, float]] = []
    for constants, value in ends:
        if not minima or value > minima[-1][1] * (1 + _SAME_VALLEY):
            minima.append((constants, value))
    return tuple(constants for constants, _ in minima[:_MAX_MINIMA])


def _raise_small_terms(problem: LogProblem, constants: Array) -> Array:
    """Return constants with larger terms at the centre, where they are small."""
    num_terms = 1 + len(problem.logs)
    smallest = math.log(MIN_TERM) + problem.targets.mean()
    terms = np.maximum(constants[:num_terms], smallest)
    return np.concatenate([terms, constants[num_terms:]])


def _maximize_likelihood(problem: LogProblem, starts: Sequence[Array]) -> tuple[Array, float]:
    """Return the constants and the negative log likelihood with the best scale of the residuals.

    Given the scale, the likelihood is that of a Huber fit with the threshold delta x scale. As this
    is far below the residuals, the threshold is reduced in steps.
    """
    ends = [_reduce_threshold(problem, start) for start in starts]
    return min(ends, key=lambda end: end[1])


def _reduce_threshold(problem: LogProblem, constants: Array) -> tuple[Array, float]:
    threshold = problem.threshold
    while True:
        residuals = problem.compute_residuals(constants)
        scale, total = _find_scale(residuals)
        if threshold <= DELTA * scale * (1 + _SAME_MINIMUM):
            return constants, total
        threshold = max(threshold / 10, DELTA * scale)
        constants, _ = minimize(replace(problem, threshold=threshold), constants)


def _find_scale(residuals: Array) -> tuple[float, float]:
    """Return the scale of the residuals with the lowest negative log likelihood, and that."""
    from scipy import optimize

    def compute(log_scale: float) -> float:
        scaled = residuals * math.exp(-log_scale)
        clipped = np.clip(scaled, -DELTA, DELTA)
        density = math.sqrt(2 * math.pi) * math.erf(DELTA / math.sqrt(2))
        density += 2 * math.exp(-(DELTA**2) / 2) / DELTA
        total = float((clipped * (scaled - clipped / 2)).sum())
        return total + len(residuals) * (math.log(density) + log_scale)

    # Far above delta, the density is that of Laplace with the mean absolute residual as its scale
    middle = math.log(DELTA * np.abs(residuals).mean())
    result = optimize.minimize_scalar(compute, bracket=(middle - 1, middle + 1), tol=1e-12)
    return math.exp(result.x), float(result.fun)


def bootstrap(
    problem: LogProblem, starts: Sequence[Array], groups: Sequence[str], num_samples: int, seed: int
) -> PowerLaw:
    """Return the law of each bootstrap sample, a resample of whole groups of points.

    Each sample is fitted from the minima of all points, with terms of at least 5% of the loss: the
    gradient of a term that is almost 0 would be 0 as well.

    Args:
        problem: Regression of all points.
        starts: Constants at which the optimizer starts.
        groups: Group of each point.
        num_samples: Number of samples.
        seed: Seed of the samples.
    """
    starts = [_raise_small_terms(problem, start) for start in starts]
    ends = []
    for weights in sample_weights(groups, num_samples, seed):
        sample = replace(problem, weights=weights)
        found = (minimize(sample, start, is_near=True) for start in starts)
        ends.append(min(found, key=lambda end: end[1])[0])
    return problem.convert_to_law(np.stack(ends))
