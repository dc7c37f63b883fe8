"""All fits to the points of a study."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.study.compute_law import ComputeLaw, fit_compute_law
from hlat.study.hyperparameter_law import (
    HyperparameterLaw,
    fit_hyperparameter_laws,
    select_best_points,
)
from hlat.study.isoflop_curves import IsoflopCurve, build_isoflop_curves
from hlat.study.power_law import PowerLawFit, fit_power_law
from hlat.study.scaling_fit import (
    FitSettings,
    Optimum,
    Prediction,
    ScalingFit,
    fit_scaling_law,
)
from hlat.study.scaling_points import ScalingPoints, validate_points
from hlat.study.task_curve import TaskCurve, fit_task_curve

_DEFAULT_BUDGETS = (1.0, 10.0)
"""Budgets of the table of optima as multiples of the largest fitted compute."""


@dataclass(frozen=True)
class ScalingAnalysis:
    """Fits to the points of a study.

    Attributes:
        fit: Law of parameters and tokens.
        other_fit: The same with the other count of parameters; None if it is unknown.
        curves: IsoFLOP curves.
        compute_law: Law of compute; None with few points.
        task: Accuracy of a task over loss; None without accuracies.
        laws: Best learning rate and batch over compute, if groups of points vary them.
        budgets: Compute in FLOPs for which optima are printed.
        notes: Points that are not fitted.
        held_out: Points with which the fit is compared; None without any.
    """

    fit: ScalingFit
    other_fit: PowerLawFit | None
    curves: Sequence[IsoflopCurve]
    compute_law: ComputeLaw | None
    task: TaskCurve | None
    laws: Sequence[HyperparameterLaw]
    budgets: Sequence[float]
    notes: Sequence[str]
    held_out: ScalingPoints | None = None

    @cached_property
    def held_out_predictions(self) -> list[Prediction]:
        """Predictions of the held-out points."""
        if self.held_out is None:
            return []
        return [self.fit.predict(float(n), float(d)) for n, d in self.held_out.inputs.T]

    @property
    def optima(self) -> list[Optimum]:
        """Best allocation of each budget."""
        return [self.fit.compute_optimum(budget) for budget in self.budgets]

    @property
    def warnings(self) -> list[str]:
        """Limits of the fits."""
        count = sum(not curve.has_optimum for curve in self.curves)
        text = f"{count:,} of {len(self.curves):,} IsoFLOP curves have no certain optimum and do "
        curves = [f"{text}not enter the exponents and the law of compute"] if count else []
        laws = [warning for law in self.laws for warning in law.warnings]
        return [*self.fit.list_warnings(self.budgets), *curves, *laws]


def analyze_points(
    points: ScalingPoints,
    settings: FitSettings,
    budgets: Sequence[float] = (),
    notes: Sequence[str] = (),
    max_flops: float | None = None,
) -> ScalingAnalysis:
    """Return all fits to points, up to `max_flops`.

    If groups of equal size and length have several learning rates or batches, the laws of the loss
    are those of the best ones.

    Raises:
        ConfigError: The points do not determine the law of parameters and tokens, or the accuracy,
            or none is above `max_flops`.
    """
    held_out = None
    if max_flops is not None:
        points, held_out = _split_points(points, max_flops)
    laws = fit_hyperparameter_laws(points, settings)
    if laws:
        points, more_notes = _select_fitted(points)
        notes = [*notes, *more_notes]
    fit = fit_scaling_law(points, settings)
    other, other_fit = points.other_parameters, None
    if other is not None:
        inputs = np.stack([other, points.tokens])
        other_fit = fit_power_law(inputs, points.losses, settings.objective)
    curves = build_isoflop_curves(points)
    compute_law = fit_compute_law(points, curves, settings)
    task = fit_task_curve(points, settings)
    largest = float(points.flops.max())
    budgets = budgets or [factor * largest for factor in _DEFAULT_BUDGETS]
    return ScalingAnalysis(
        fit, other_fit, curves, compute_law, task, laws, budgets, notes, held_out
    )


def _split_points(points: ScalingPoints, max_flops: float) -> tuple[ScalingPoints, ScalingPoints]:
    """Return the points up to a compute, and the others."""
    is_fitted = points.flops <= max_flops
    if is_fitted.all():
        raise ConfigError(
            f"max_flops={max_flops:.4g} holds out no point: the largest of {points.source} has "
            f"{points.flops.max():.4g} FLOPs"
        )
    fitted = points.select(is_fitted)
    validate_points(fitted)
    return fitted, points.select(~is_fitted)


def _select_fitted(points: ScalingPoints) -> tuple[ScalingPoints, list[str]]:
    """Return the points with the best hyperparameters, or all if these are too few, and a note."""
    best = select_best_points(points)
    try:
        validate_points(best)
    except ConfigError:
        text = "points with the best learning rate and batch are too few for the law of parameters"
        return points, [f"{len(best):,} {text} and tokens, which is fitted to all {len(points):,}"]
    count = len(points) - len(best)
    text = "points with another learning rate or batch than the best of their size and length from"
    return best, [f"omitted {count:,} {text} the laws of the loss"] if count else []
