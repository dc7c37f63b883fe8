"""Fit of a law of parameters and tokens: intervals, residuals, influence, optimum and warnings."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hlat.study import power_law
from hlat.study.power_law import Array, Objective, PowerLaw, PowerLawFit
from hlat.study.scaling_points import ScalingPoints, validate_points

CONFIDENCE = 0.95
"""Coverage of all intervals."""
MAX_EXTRAPOLATION = 10.0
"""Ratio to the largest fitted compute above which a warning is printed: one order of magnitude."""
MAX_SPAN = 10.0
"""Ratio of the ends of an interval above which a constant is not identified."""
MIN_GROUPS = 5
"""Groups below which a bootstrap has too few distinct samples for an interval of 95%."""
NUM_CONSTANTS = 5


@dataclass(frozen=True)
class FitSettings:
    """Settings of a fit.

    Attributes:
        objective: Loss over residuals.
        num_samples: Bootstrap samples.
        seed: Seed of the samples.
    """

    objective: Objective = Objective.huber
    num_samples: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class Interval:
    """Value with the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def span(self) -> float:
        """Ratio of the ends; infinite if the lower one is not positive."""
        return self.high / self.low if self.low > 0 else math.inf

    def contains(self, value: float) -> bool:
        """Return True if a value is within the ends."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Prediction:
    """Loss of a model.

    Attributes:
        parameters: Parameters.
        tokens: Training tokens.
        curve: Loss of the law, with the interval of the fitted constants.
        run: The same with the interval of a single run, which its residual widens.
    """

    parameters: float
    tokens: float
    curve: Interval
    run: Interval


@dataclass(frozen=True)
class Optimum:
    """Best allocation of a compute budget, with its loss, also of each bootstrap sample."""

    flops: float
    parameters: Interval
    tokens: Interval
    loss: Interval
    loss_samples: Array


@dataclass(frozen=True)
class ScalingFit:
    """Fitted law of parameters and tokens.

    Attributes:
        points: Fitted points.
        settings: Settings of the fit.
        fit: Minimum of the objective.
        samples: Law of each bootstrap sample.
    """

    points: ScalingPoints
    settings: FitSettings
    fit: PowerLawFit
    samples: PowerLaw

    @property
    def law(self) -> PowerLaw:
        """Fitted constants."""
        return self.fit.law

    @cached_property
    def residuals(self) -> Array:
        """Logarithm of the losses minus that of the predicted ones [points]."""
        return np.log(self.points.losses) - np.log(self.law.predict(self.points.inputs))

    @property
    def constants(self) -> dict[str, Interval]:
        """Constants by name."""
        values, samples = list_constants(self.law), list_constants(self.samples)
        return {name: build_interval(values[name], samples[name]) for name in values}

    @property
    def exponents(self) -> dict[str, Interval]:
        """Exponents of the optimal parameters and tokens over compute."""
        values, samples = compute_exponents(self.law), compute_exponents(self.samples)
        return {
            "N ~ C^a": build_interval(values, samples),
            "D ~ C^b": build_interval(1 - values, 1 - samples),
        }

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """Return the loss of a model.

        The interval of a run adds to each bootstrap sample the residual of a random point,
        increased for the degrees of freedom that the constants use.
        """
        inputs = np.array([[parameters], [tokens]])
        value = float(self.law.predict(inputs)[0])
        samples = self.samples.predict(inputs)[:, 0]
        generator = np.random.default_rng(self.settings.seed)
        num_points = len(self.points)
        noise = generator.choice(self.residuals, len(samples))
        noise *= math.sqrt(num_points / (num_points - NUM_CONSTANTS))
        runs = samples * np.exp(noise)
        curve, run = build_interval(value, samples), build_interval(value, runs)
        return Prediction(parameters, tokens, curve, run)

    def compute_optimum(self, flops: float) -> Optimum:
        """Return the allocation of a budget with the lowest loss, and this loss."""
        factor = self.points.flops_factor
        (n, d), (many_n, many_d) = (
            allocate(law, flops / factor) for law in (self.law, self.samples)
        )
        loss = self.law.predict(np.stack([n, d])[:, None])[..., 0]
        with np.errstate(divide="ignore"):  # samples without an optimum
            terms = np.stack([many_n, many_d], -1) ** -self.samples.exponents
        losses = self.samples.irreducible + (self.samples.coefficients * terms).sum(-1)
        return Optimum(
            flops,
            build_interval(n, many_n),
            build_interval(d, many_d),
            build_interval(loss, losses),
            losses,
        )

    @cached_property
    def influences(self) -> Array:
        """Change of the constants without each point, in standard deviations of the bootstrap.

        The largest of the changes of E, alpha and beta [points]. Refits start at the minimum.
        """
        problem = power_law.build_problem(self.points.inputs, self.points.losses)
        start = self.fit.minima[0]
        kept = [0, 3, 4]
        spread = np.array(
            [
                np.log(self.samples.irreducible).std(),
                *self.samples.exponents.std(0),
            ]
        )
        changes = np.empty(len(self.points))
        for i in range(len(self.points)):
            weights = problem.weights.copy()
            weights[i] = 0
            end, _ = power_law.minimize(replace(problem, weights=weights), start, is_near=True)
            changes[i] = np.abs((end - start)[kept] / spread).max()
        return changes

    def list_warnings(self, budgets: Sequence[float] = ()) -> list[str]:
        """Return what limits the fit, and the prediction at compute budgets in FLOPs."""
        return [*_find_limits(self), *_find_extrapolations(self, budgets)]


def fit_scaling_law(points: ScalingPoints, settings: FitSettings) -> ScalingFit:
    """Return the law of parameters and tokens with bootstrap samples.

    Raises:
        ConfigError: The points do not determine a law.
    """
    validate_points(points)
    fit = power_law.fit_power_law(points.inputs, points.losses, settings.objective)
    problem = power_law.build_problem(points.inputs, points.losses)
    num_samples, seed = settings.num_samples, settings.seed
    samples = power_law.bootstrap(problem, fit.minima, points.groups, num_samples, seed)
    return ScalingFit(points, settings, fit, samples)


def list_constants(law: PowerLaw) -> dict[str, Array]:
    """Return E, A, alpha, B and beta of one law or of several."""
    return {
        "E": law.irreducible,
        "A": law.coefficients[..., 0],
        "alpha": law.exponents[..., 0],
        "B": law.coefficients[..., 1],
        "beta": law.exponents[..., 1],
    }


def compute_exponents(law: PowerLaw) -> Array:
    """Return the exponent of the optimal parameters over compute, beta / (alpha + beta)."""
    return np.asarray(law.exponents[..., 1] / law.exponents.sum(-1))


def allocate(law: PowerLaw, product: float) -> tuple[Array, Array]:
    """Return parameters and tokens with the lowest loss for a given product of both.

    N = G P^a and D = P / N with G = (alpha A / (beta B))^(1 / (alpha + beta)) (Hoffmann et al.,
    arXiv 2203.15556, equation 4).
    """
    beta, total = law.exponents[..., 1], law.exponents.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = np.log(law.coefficients) + np.log(law.exponents)
        log_parameters = (ratios[..., 0] - ratios[..., 1] + beta * math.log(product)) / total
        parameters = np.exp(log_parameters)
        return parameters, product / parameters


def build_interval(value: Array | float, samples: Array) -> Interval:
    """Return a value with the quantiles of its bootstrap samples."""
    known = samples[np.isfinite(samples)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(known, [tail, 1 - tail]) if len(known) else (math.nan, math.nan)
    return Interval(float(value), float(low), float(high))


def _find_limits(fit: ScalingFit) -> Iterator[str]:
    smallest = power_law.MIN_TERM * float(fit.points.losses.min())
    if fit.law.irreducible < smallest:
        yield (
            f"E is not identified: it is {fit.law.irreducible:.3g}, below {power_law.MIN_TERM:.0%} "
            "of the lowest loss; add larger models with more tokens"
        )
    for name, interval in fit.constants.items():
        if not interval.span <= MAX_SPAN:
            yield (
                f"{name} is not identified: its interval {interval.low:.3g} to {interval.high:.3g} "
                f"spans more than a factor of {MAX_SPAN:g}; predictions within the fitted range "
                "remain valid"
            )
    if (num := len(set(fit.points.groups))) < MIN_GROUPS:
        yield (
            f"{num} groups are resampled; below {MIN_GROUPS}, intervals are too narrow; use group= "
            "with more values, or none"
        )
    middle = float(np.median(fit.points.flops))  # at the largest compute, a ladder ends
    parameters = fit.compute_optimum(middle).parameters.value
    low, high = fit.points.parameters.min(), fit.points.parameters.max()
    if not low < parameters < high:
        yield (
            f"the optimum at the median compute, {parameters:.3g} parameters, is outside of the "
            f"fitted sizes, {low:.3g} to {high:.3g}; add points with other sizes"
        )


def _find_extrapolations(fit: ScalingFit, budgets: Sequence[float]) -> Iterator[str]:
    largest = float(fit.points.flops.max())
    for budget in budgets:
        if budget > MAX_EXTRAPOLATION * largest:
            yield (
                f"{budget:.3g} FLOPs are {budget / largest:.3g} times the largest fitted compute; "
                f"beyond {MAX_EXTRAPOLATION:g} times, the error of the law itself, which the "
                "interval does not contain, may dominate"
            )
