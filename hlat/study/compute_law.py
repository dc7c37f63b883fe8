"""Loss over compute with an irreducible term: L = E + A / C^gamma, for the best points."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hlat.study import power_law
from hlat.study.isoflop_curves import IsoflopCurve, find_frontier
from hlat.study.power_law import Array, PowerLaw
from hlat.study.scaling_fit import FitSettings, Interval, build_interval
from hlat.study.scaling_points import ScalingPoints

MIN_BEST_POINTS = 5
"""Points of a law with three constants, as a bootstrap of fewer has too few distinct samples."""


@dataclass(frozen=True)
class ComputeLaw:
    """Law of the best loss at each compute.

    Attributes:
        flops: Compute of the fitted points.
        losses: Their losses.
        of_curves: True if they are the optima of IsoFLOP curves, False if points of the frontier.
        law: Fitted constants.
        samples: Law of each bootstrap sample of the points.
    """

    flops: Array
    losses: Array
    of_curves: bool
    law: PowerLaw
    samples: PowerLaw

    @property
    def constants(self) -> dict[str, Interval]:
        """Constants by name."""
        law, samples = self.law, self.samples
        return {
            "E": build_interval(law.irreducible, samples.irreducible),
            "A": build_interval(law.coefficients[0], samples.coefficients[:, 0]),
            "gamma": build_interval(law.exponents[0], samples.exponents[:, 0]),
        }

    def predict(self, flops: Array) -> list[Interval]:
        """Return the loss at other compute, with the interval of the fitted constants."""
        values, samples = self.law.predict(flops[None]), self.samples.predict(flops[None])
        return [build_interval(*pair) for pair in zip(values, samples.T, strict=True)]


def fit_compute_law(
    points: ScalingPoints, curves: Sequence[IsoflopCurve], settings: FitSettings
) -> ComputeLaw | None:
    """Return the law of the optima of IsoFLOP curves, or of the frontier; None with few points."""
    found = [(curve.flops, curve.loss) for curve in curves if curve.has_optimum]
    of_curves = len(found) >= MIN_BEST_POINTS
    if not of_curves:
        frontier = find_frontier(points)
        found = [*zip(points.flops[frontier], points.losses[frontier], strict=True)]
    if len(found) < MIN_BEST_POINTS:
        return None
    flops, losses = np.array(found).T
    fit = power_law.fit_power_law(flops[None], losses)
    problem = power_law.build_problem(flops[None], losses)
    groups = [str(i) for i in range(len(losses))]
    samples = power_law.bootstrap(problem, fit.minima, groups, settings.num_samples, settings.seed)
    return ComputeLaw(flops, losses, of_curves, fit.law, samples)
