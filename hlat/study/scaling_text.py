"""Scaling fits as tables for a terminal, and as JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hlat.study.hyperparameter_law import GroupOptimum, HyperparameterLaw
from hlat.study.isoflop_curves import IsoflopCurve, fit_exponent
from hlat.study.power_law import PowerLawFit
from hlat.study.scaling_analysis import ScalingAnalysis
from hlat.study.scaling_fit import (
    CONFIDENCE,
    Interval,
    Optimum,
    ScalingFit,
    compute_exponents,
    list_constants,
)
from hlat.study.scaling_points import ScalingPoints
from hlat.study.task_curve import TaskCurve
from hlat.tracking.text_format import UNKNOWN, format_table

_NUM_INFLUENTIAL = 5


def format_analysis(analysis: ScalingAnalysis) -> list[str]:
    """Return the tables of all fits for a terminal."""
    fit, points = analysis.fit, analysis.fit.points
    lines = [
        f"{len(points):,} points of {points.source}, {points.metric}",
        *analysis.notes,
        "",
        "L = E + A / N^alpha + B / D^beta",
        *_format_intervals({**fit.constants, **fit.exponents}),
        f"objective {fit.fit.objective:.7g} ({fit.settings.objective.value}), reached from "
        f"{fit.fit.num_converged} of {fit.fit.num_starts} starts",
    ]
    if analysis.other_fit is not None:
        lines += ["", *_format_other_fit(analysis.other_fit, points.other_name)]
    lines += ["", "optimum of a compute budget", *_format_optima(analysis)]
    if analysis.task is not None:
        lines += ["", f"{analysis.task.name} = floor + gain / (1 + exp(slope (L - middle)))"]
        lines += _format_intervals(analysis.task.intervals)
    if analysis.curves:
        lines += ["", "IsoFLOP curves", *_format_curves(analysis.curves)]
    if analysis.compute_law is not None:
        of = "optima of IsoFLOP curves" if analysis.compute_law.of_curves else "best points"
        count = len(analysis.compute_law.flops)
        lines += ["", f"L = E + A / C^gamma, {count} {of}"]
        lines += _format_intervals(analysis.compute_law.constants)
    for hyperparameter in analysis.laws:
        lines += ["", *_format_law(hyperparameter, analysis.budgets)]
    if analysis.held_out is not None:
        lines += ["", *_format_held_out(analysis, analysis.held_out)]
    lines += ["", "most influential points", *_format_influences(fit)]
    return [*lines, *(f"WARNING: {warning}" for warning in analysis.warnings)]


def summarize_analysis(analysis: ScalingAnalysis) -> dict[str, Any]:
    """Return all numbers as JSON-able values; an unknown one is None."""
    fit, law = analysis.fit, analysis.compute_law
    return {
        "points": len(fit.points),
        "source": fit.points.source,
        "metric": fit.points.metric,
        "confidence": CONFIDENCE,
        "law": summarize_fit(fit),
        "law_of_other_parameters": analysis.other_fit and _summarize_other_fit(analysis.other_fit),
        "optima": [
            {"flops": one.flops} | _summarize_intervals(_get_optimum_columns(one, analysis.task))
            for one in analysis.optima
        ],
        "isoflop_curves": [
            {
                "flops": curve.flops,
                "points": [fit.points.names[i] for i in curve.indices],
                "parameters": summarize_interval(curve.parameters),
                "tokens": _clean(curve.tokens),
                "loss": _clean(curve.loss),
                "warning": curve.warning,
            }
            for curve in analysis.curves
        ],
        "compute_law": law and _summarize_intervals(law.constants),
        "task": analysis.task and _summarize_intervals(analysis.task.intervals),
        "held_out": _summarize_held_out(analysis),
        "hyperparameters": [_summarize_law(law, analysis.budgets) for law in analysis.laws],
        "notes": [*analysis.notes],
        "warnings": analysis.warnings,
    }


def summarize_fit(fit: ScalingFit) -> dict[str, Any]:
    """Return constants, exponents and settings of a fit as JSON-able values."""
    return {
        "constants": _summarize_intervals(fit.constants),
        "exponents": _summarize_intervals(fit.exponents),
        "objective": {"name": fit.settings.objective.value, "value": fit.fit.objective},
        "starts": {"total": fit.fit.num_starts, "converged": fit.fit.num_converged},
        "bootstrap": {"samples": fit.settings.num_samples, "seed": fit.settings.seed},
        "flops_per_parameter_and_token": fit.points.flops_factor,
    }


def format_interval(interval: Interval, digits: int = 4) -> str:
    """Return a value with its interval, if it has one."""
    if not math.isfinite(interval.value) or math.isnan(interval.low):
        return _format_number(interval.value, digits)
    if math.isinf(interval.high):
        return f"{_format_number(interval.value, digits)} (unbounded)"
    ends = (_format_number(end, digits) for end in (interval.low, interval.high))
    return f"{_format_number(interval.value, digits)} ({' to '.join(ends)})"


def _format_number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if math.isfinite(value) else UNKNOWN


def _format_intervals(intervals: Mapping[str, Interval]) -> list[str]:
    rows = [
        [name, *(_format_number(value, 5) for value in (one.value, one.low, one.high))]
        for name, one in intervals.items()
    ]
    return format_table(["", "value", f"{CONFIDENCE:.0%} interval from", "to"], rows)


def _format_other_fit(fit: PowerLawFit, column: str) -> list[str]:
    values = list_constants(fit.law) | {"a": compute_exponents(fit.law)}
    names = ("E", "alpha", "beta", "a")
    constants = ", ".join(f"{name} {_format_number(float(values[name]))}" for name in names)
    return [f"with {column} as N: {constants}, objective {fit.objective:.7g}"]


def _summarize_other_fit(fit: PowerLawFit) -> dict[str, Any]:
    constants = {name: float(value) for name, value in list_constants(fit.law).items()}
    return {"constants": constants, "objective": fit.objective}


def _format_optima(analysis: ScalingAnalysis) -> list[str]:
    task = analysis.task
    rows = [
        [
            _format_number(one.flops),
            *(format_interval(value, 3) for value in (one.parameters, one.tokens)),
            _format_number(one.tokens.value / one.parameters.value, 3),
            format_interval(one.loss),
            *([] if task is None else [format_interval(_predict_accuracy(task, one))]),
        ]
        for one in analysis.optima
    ]
    headers = ["FLOPs", "parameters", "tokens", "tokens/parameter", "loss"]
    return format_table(headers if task is None else [*headers, task.name], rows)


def _format_curves(curves: Sequence[IsoflopCurve]) -> list[str]:
    rows = [
        [
            _format_number(curve.flops),
            str(len(curve.indices)),
            format_interval(curve.parameters, 3),
            _format_number(curve.tokens, 3),
            _format_number(curve.loss),
            curve.warning,
        ]
        for curve in curves
    ]
    lines = format_table(["FLOPs", "points", "best parameters", "tokens", "loss", ""], rows)
    found = [curve for curve in curves if curve.has_optimum]
    if len(found) < 2:
        return lines
    flops = [curve.flops for curve in found]
    sizes = fit_exponent(flops, [curve.parameters.value for curve in found])
    tokens = fit_exponent(flops, [curve.tokens for curve in found])
    exponents = (f"N ~ C^a with a = {format_interval(sizes)}", f"b = {format_interval(tokens)}")
    return [*lines, ", D ~ C^b with ".join(exponents)]


def _format_law(law: HyperparameterLaw, budgets: Sequence[float]) -> list[str]:
    """Return the optimum of each group, the constants, and the optima of budgets."""
    rows = [
        [
            *(_format_number(value) for value in (one.flops, one.parameters, one.tokens)),
            str(len(one.values)),
            format_interval(_get_best(one), 3),
            _format_number(one.optimum.value),
            one.reason,
        ]
        for one in law.groups
    ]
    headers = ["FLOPs", "parameters", "tokens", "values", f"best {law.name}", "loss", ""]
    lines = [f"best {law.name} of models of equal size and length", *format_table(headers, rows)]
    if law.reason:
        return [*lines, law.reason]
    lines += ["", f"best {law.name} = a C^b, {len(law.bracketed)} of {len(rows)} groups"]
    lines += _format_intervals(law.constants)
    at = ", ".join(
        f"{format_interval(law.predict(budget), 3)} at {_format_number(budget)} FLOPs"
        for budget in budgets
    )
    return [*lines, f"best {law.name}: {at}"]


def _summarize_law(law: HyperparameterLaw, budgets: Sequence[float]) -> dict[str, Any]:
    return {
        "name": law.name,
        "groups": [
            {
                "flops": one.flops,
                "parameters": one.parameters,
                "tokens": one.tokens,
                "values": one.values.tolist(),
                "losses": one.losses.tolist(),
                "best": summarize_interval(_get_best(one)),
                "loss": _clean(one.optimum.value),
                "warning": one.reason,
            }
            for one in law.groups
        ],
        "constants": _summarize_intervals(law.constants),
        "optima": [
            {"flops": budget, "value": summarize_interval(law.predict(budget))}
            for budget in ([] if law.reason else budgets)
        ],
        "warning": law.reason,
    }


def _get_best(group: GroupOptimum) -> Interval:
    optimum = group.optimum
    return Interval(optimum.rate, optimum.low, optimum.high)


def _format_held_out(analysis: ScalingAnalysis, points: ScalingPoints) -> list[str]:
    """Return the held-out points with their predictions, and how many intervals contain them."""
    largest, rows, num_within = float(analysis.fit.points.flops.max()), list[list[str]](), 0
    for i, one in enumerate(analysis.held_out_predictions):
        loss = float(points.losses[i])
        num_within += one.run.contains(loss)
        rows.append(
            [
                points.names[i],
                *(_format_number(value) for value in (one.parameters, one.tokens)),
                f"x {_format_number(float(points.flops[i]) / largest, 3)}",
                _format_number(loss),
                format_interval(one.run),
                f"{100 * (loss / one.run.value - 1):+.2f} %",
            ]
        )
    headers = ["held-out point", "parameters", "tokens", "compute", "loss", "predicted", "error"]
    text = f"{num_within} of {len(rows)} losses are within their {CONFIDENCE:.0%} intervals"
    return [*format_table(headers, rows), text]


def _summarize_held_out(analysis: ScalingAnalysis) -> list[dict[str, Any]]:
    points = analysis.held_out
    if points is None:
        return []
    return [
        {
            "point": points.names[i],
            "flops": float(points.flops[i]),
            "parameters": one.parameters,
            "tokens": one.tokens,
            "loss": float(points.losses[i]),
            "predicted": summarize_interval(one.run),
        }
        for i, one in enumerate(analysis.held_out_predictions)
    ]


def _format_influences(fit: ScalingFit) -> list[str]:
    """Return the points with the largest influence on the constants."""
    order = np.argsort(-fit.influences)[:_NUM_INFLUENTIAL]
    points = fit.points
    rows = [
        [
            points.names[i],
            *(_format_number(values[i]) for values in (*points.inputs, points.losses)),
            f"{100 * fit.residuals[i]:+.3f} %",
            _format_number(fit.influences[i], 2),
        ]
        for i in order
    ]
    headers = ["point", "parameters", "tokens", "loss", "residual", "influence"]
    return format_table(headers, rows)


def _get_optimum_columns(optimum: Optimum, task: TaskCurve | None) -> dict[str, Interval]:
    columns = {
        "parameters": optimum.parameters,
        "tokens": optimum.tokens,
        "loss": optimum.loss,
    }
    return columns if task is None else columns | {"accuracy": _predict_accuracy(task, optimum)}


def _predict_accuracy(task: TaskCurve, optimum: Optimum) -> Interval:
    return task.predict(optimum.loss.value, optimum.loss_samples)


def _summarize_intervals(intervals: Mapping[str, Interval]) -> dict[str, Any]:
    return {name: summarize_interval(interval) for name, interval in intervals.items()}


def summarize_interval(interval: Interval) -> dict[str, float | None]:
    """Return value and ends of an interval as JSON-able values."""
    return {name: _clean(value) for name, value in vars(interval).items()}


def _clean(value: float) -> float | None:
    return value if math.isfinite(value) else None
