"""Best learning rate and batch of models over compute: optimum = a C^b.

The form is that of DeepSeek LLM (arXiv 2401.02954, section 3.1), which fits the best learning rates
and batches of grids of small models over their compute. Step Law (arXiv 2503.04715) finds the same
power laws in parameters and tokens. The optimum of a group, the models of equal size and length, is
the minimum of a parabola of the loss over the log of the hyperparameter (lr_optimum.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.study.lr_optimum import LrCurve, LrOptimum, OptimumStatus, find_lr_optimum
from hlat.study.power_law import Array
from hlat.study.scaling_fit import CONFIDENCE, MIN_GROUPS, FitSettings, Interval, build_interval
from hlat.study.scaling_points import ScalingPoints, count_distinct

MIN_OPTIMA = 3
"""Groups of a law with two constants, as two determine it without a residual."""
_GROUP_WIDTH = np.log(1.02)
"""Largest ratio of neighbouring sizes or lengths of a group: a length in whole steps depends on the
batch."""
_SAME_VALUE = 1e-3
"""Largest difference of the log of equal hyperparameters."""
_REASONS = {
    OptimumStatus.found: "",
    OptimumStatus.below: "the smallest value is the best; add smaller ones",
    OptimumStatus.above: "the largest value is the best; add larger ones",
    OptimumStatus.unstable: "the largest value without diverged runs is the best",
    OptimumStatus.not_convex: "the parabola has no certain minimum; add values or seeds",
    OptimumStatus.incomplete: "fewer than three values",
}


@dataclass(frozen=True)
class GroupOptimum:
    """Best value of a hyperparameter for models of equal size and length.

    Attributes:
        parameters: Geometric mean of the parameters.
        tokens: Geometric mean of the training tokens.
        flops: Geometric mean of the training FLOPs.
        values: Values of the hyperparameter in ascending order [values].
        losses: Lowest loss at each value over the other hyperparameter, of the mean over equal
            models [values].
        optimum: Minimum of the parabola.
    """

    parameters: float
    tokens: float
    flops: float
    values: Array
    losses: Array
    optimum: LrOptimum

    @property
    def reason(self) -> str:
        """Reason for which there is no optimum; empty if there is one."""
        return _REASONS[self.optimum.status]


@dataclass(frozen=True)
class HyperparameterLaw:
    """Optimum of a hyperparameter over compute.

    Attributes:
        name: Name in tables and files.
        groups: Optimum of each group, in ascending order of the compute.
        center: Log of the compute at which `offsets` are stated.
        offsets: Log of the optimum at `center` of the fit and of each bootstrap sample of the
            groups [1 + samples]; empty without a law.
        exponents: Exponent b of the same [1 + samples].
    """

    name: str
    groups: Sequence[GroupOptimum]
    center: float
    offsets: Array
    exponents: Array

    @property
    def bracketed(self) -> list[GroupOptimum]:
        """Groups with an optimum."""
        return [group for group in self.groups if not group.reason]

    @property
    def reason(self) -> str:
        """Reason for which there is no law; empty if there is one."""
        if len(self.offsets):
            return ""
        count = len(self.bracketed)
        return (
            f"no law of the {self.name}: {count} of {len(self.groups)} groups of equal size and "
            f"length have an optimum between their values, and a law needs {MIN_OPTIMA} with "
            "different compute"
        )

    @property
    def constants(self) -> dict[str, Interval]:
        """Constants by name, with the intervals of the bootstrap; empty without a law."""
        if not len(self.offsets):
            return {}
        factors = np.exp(self.offsets - self.exponents * self.center)
        return {
            "a": build_interval(float(factors[0]), factors[1:]),
            "b": build_interval(float(self.exponents[0]), self.exponents[1:]),
        }

    @property
    def warnings(self) -> list[str]:
        """Limits of the intervals."""
        if self.reason or (count := len(self.bracketed)) >= MIN_GROUPS:
            return []
        return [
            f"the law of the {self.name} has {count} groups; intervals of fewer than {MIN_GROUPS} "
            "are too narrow"
        ]

    def predict(self, flops: float) -> Interval:
        """Return the best value at other compute, with the interval of the constants."""
        values = np.exp(self.offsets + self.exponents * (np.log(flops) - self.center))
        return build_interval(float(values[0]), values[1:])


def fit_hyperparameter_laws(
    points: ScalingPoints, settings: FitSettings
) -> list[HyperparameterLaw]:
    """Return the laws of the hyperparameters of which a group has several values.

    Args:
        points: Points, also those with other values than the best.
        settings: Number and seed of the bootstrap samples.
    """
    laws = []
    for name, values, others in (
        ("learning rate", points.learning_rates, points.batch_tokens),
        ("batch in tokens", points.batch_tokens, points.learning_rates),
    ):
        groups = [] if values is None else [*_find_optima(points, values, others)]
        if groups:
            laws.append(_fit_law(name, groups, settings))
    return laws


def select_best_points(points: ScalingPoints) -> ScalingPoints:
    """Return the points with the learning rate and batch of the lowest mean loss in their group."""
    known = [v for v in (points.learning_rates, points.batch_tokens) if v is not None]
    if not known:
        return points
    chosen = np.zeros(len(points), bool)
    for group in _list_groups(points):
        cells = _label(np.stack(known)[:, group])
        means = [points.losses[group][cells == cell].mean() for cell in range(cells.max() + 1)]
        chosen[group[cells == int(np.argmin(means))]] = True
    return points if chosen.all() else points.select(chosen)


def _list_groups(points: ScalingPoints) -> Iterator[NDArray[np.intp]]:
    """Yield the indices of the points of equal size and length, in ascending order of the compute.

    Points whose neighbours in size or length differ by less than `_GROUP_WIDTH` are equal.
    """
    labels = _label(points.inputs, _GROUP_WIDTH)
    groups = [np.flatnonzero(labels == label) for label in range(int(labels.max()) + 1)]
    yield from sorted(groups, key=lambda group: float(points.flops[group].mean()))


def _cluster(values: Array, width: float = _SAME_VALUE) -> NDArray[np.intp]:
    """Return the index of the cluster of each value on a log scale [points]."""
    logs = np.log(values)
    order = np.argsort(logs, kind="stable")
    labels = np.empty(len(values), np.intp)
    labels[order] = np.cumsum(np.diff(logs[order], prepend=logs[order[0]]) > width)
    return labels


def _label(table: Array, width: float = _SAME_VALUE) -> NDArray[np.intp]:
    """Return the index of the combination of values in each column of a table [points]."""
    rows = np.stack([_cluster(row, width) for row in table])
    _, labels = np.unique(rows, axis=1, return_inverse=True)
    return np.asarray(labels, np.intp).ravel()


def _find_optima(
    points: ScalingPoints, values: Array, others: Array | None
) -> Iterator[GroupOptimum]:
    """Yield the optimum of each group with several values."""
    for group in _list_groups(points):
        if count_distinct(values[group]) < 2:
            continue
        distinct, losses = _build_profile(
            values[group], None if others is None else others[group], points.losses[group]
        )
        curve = LrCurve(distinct, losses[None], np.zeros(len(distinct), np.int64))
        yield GroupOptimum(
            _compute_mean(points.parameters[group]),
            _compute_mean(points.tokens[group]),
            _compute_mean(points.flops[group]),
            distinct,
            losses,
            find_lr_optimum(curve, CONFIDENCE),
        )


def _compute_mean(values: Array) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(values).mean()))


def _build_profile(values: Array, others: Array | None, losses: Array) -> tuple[Array, Array]:
    """Return the distinct values, and the lowest mean loss at each over the other hyperparameter.

    Equal models, such as those of several seeds, are averaged.
    """
    labels = _cluster(values)
    cells = labels if others is None else _label(np.stack([values, others]))
    means = np.array([losses[cells == cell].mean() for cell in cells])
    count = int(labels.max()) + 1
    distinct = [_compute_mean(values[labels == label]) for label in range(count)]
    lowest = [float(means[labels == label].min()) for label in range(count)]
    return np.array(distinct), np.array(lowest)


def _fit_law(name: str, groups: Sequence[GroupOptimum], settings: FitSettings) -> HyperparameterLaw:
    """Return the least-squares line of the log of the optima over the log of the compute."""
    found = [group for group in groups if not group.reason]
    x = np.log([group.flops for group in found])
    y = np.log([group.optimum.rate for group in found])
    if len(found) < MIN_OPTIMA or count_distinct(np.exp(x)) < MIN_OPTIMA:
        return HyperparameterLaw(name, groups, 0.0, np.array([]), np.array([]))
    generator, center = np.random.default_rng(settings.seed), float(x.mean())
    lines = [_fit_line(x - center, y)]
    while len(lines) <= settings.num_samples:
        drawn = generator.integers(len(x), size=len(x))
        if np.ptp(x[drawn]) > 0:
            lines.append(_fit_line(x[drawn] - center, y[drawn]))
    offsets, exponents = np.array(lines).T
    return HyperparameterLaw(name, groups, center, offsets, exponents)


def _fit_line(x: Array, y: Array) -> tuple[float, float]:
    """Return offset and slope."""
    slope = float((x - x.mean()) @ y / ((x - x.mean()) @ (x - x.mean())))
    return float(y.mean() - slope * x.mean()), slope
