"""A plan for failures as JSON and as text.

The text compares the formula with the simulation and lists all assumptions with their sources.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.plan import failure_model
from hlat.plan.failure_model import FailureScenario, FloatOrArray, TimeBreakdown
from hlat.report.text_format import format_count, format_duration

_LABELS = {
    "uptime": "uptime",
    "training": "goodput: steps that survive",
    "saving": "saves",
    "lost": "lost steps, replayed",
    "detecting": "detection",
    "responding": "response",
    "restarting": "restart and load",
}
_PERCENTILES = (5, 95)


def summarize_failure_plan(
    scenario: FailureScenario,
    simulated: TimeBreakdown[NDArray[np.float64]],
    sources: Mapping[str, str],
) -> dict[str, Any]:
    """Return a plan as JSON; shares are fractions of the wall time.

    Args:
        scenario: Scenario of the plan.
        simulated: Simulated trials of the scenario.
        sources: Source of each value of the scenario.
    """
    expected = failure_model.compute_expected_times(scenario)
    return {
        "scenario": {
            name: {"value": value, "source": sources[name]}
            for name, value in asdict(scenario).items()
        },
        "system_mtbf_s": scenario.mtbf_s,
        "formula": {
            **_compute_shares(expected),
            "wall_s": expected.wall_time,
            "failures": expected.failures,
        },
        "first_order_goodput": failure_model.approximate_goodput(scenario, scenario.interval_s),
        "simulation": _summarize_simulation(simulated),
        "interval": _summarize_interval(scenario, expected.wall_time),
    }


def format_failure_plan(plan: Mapping[str, Any]) -> list[str]:
    """Return the text of a plan from `summarize_failure_plan`."""
    settings = {name: setting["value"] for name, setting in plan["scenario"].items()}
    simulation = plan["simulation"]
    lines = [
        f"{_format_nodes(settings['nodes'])} a failure every "
        f"{format_duration(plan['system_mtbf_s'])}; {format_count(settings['steps'])} steps of "
        f"{settings['step_s']:g} s, a save every {format_count(settings['every_steps'])}",
        "",
        f"{'':30}{'formula':>12}{'simulation':>12}   5% to 95% of "
        f"{format_count(simulation['trials'])} runs",
    ]
    for name, label in _LABELS.items():
        lines.append(_format_row(label, name, plan, lambda share: f"{share:.2%}"))
    lines.append(_format_row("wall time, days", "wall_s", plan, lambda wall: f"{wall / 86400:.2f}"))
    lines.append(_format_row("failures", "failures", plan, lambda count: f"{count:.4g}"))
    return [*lines, "", *_format_interval_advice(plan), "", *_format_assumptions(plan["scenario"])]


def _summarize_simulation(ledger: TimeBreakdown[NDArray[np.float64]]) -> dict[str, Any]:
    shares, mean = _compute_shares(ledger), failure_model.average_trials(ledger)
    measures = {**shares, "wall_s": ledger.wall_time, "failures": ledger.failures}
    pooled = {
        name: failure_model.compute_pooled_fraction(values * ledger.wall_time, ledger.wall_time)
        for name, values in shares.items()
    }
    return {
        "trials": len(ledger.wall_time),
        "mean": {
            **{name: share for name, (share, _) in pooled.items()},
            "wall_s": mean.wall_time,
            "failures": mean.failures,
        },
        "standard_error": {name: error for name, (_, error) in pooled.items()},
        **{
            f"percentile_{at}": {
                name: float(np.percentile(values, at)) for name, values in measures.items()
            }
            for at in _PERCENTILES
        },
    }


def _format_row(
    label: str, name: str, plan: Mapping[str, Any], format_value: Callable[[float], str]
) -> str:
    simulation = plan["simulation"]
    formula, mean = (format_value(one[name]) for one in (plan["formula"], simulation["mean"]))
    low, high = (format_value(simulation[f"percentile_{at}"][name]) for at in _PERCENTILES)
    return f"{label:30}{formula:>12}{mean:>12}   {low} to {high}"


def _format_interval_advice(plan: Mapping[str, Any]) -> list[str]:
    interval = plan["interval"]
    best, current = interval["best_steps"], plan["scenario"]["every_steps"]["value"]
    lines = [
        f"best interval   {format_count(best)} steps, {format_duration(interval['best_s'])}: "
        f"goodput {interval['best_goodput']:.2%} in a long run "
        f"(Young {format_duration(interval['young_s'])}, "
        f"Daly {format_duration(interval['daly_s'])})"
    ]
    line = (
        f"this interval   {format_count(current)} steps, {format_duration(interval['current_s'])}"
    )
    points = f"{100 * interval['loses_goodput']:.2f}"
    if float(points) == 0:
        return [*lines, f"{line}: as good"]
    lost = format_duration(interval["loses_s"])
    return [*lines, f"{line}: loses {points} points, {lost} of this run"]


def _format_assumptions(scenario: Mapping[str, Any]) -> list[str]:
    rows = [
        (f"{name}={_format_number(setting['value'])}", setting["source"])
        for name, setting in scenario.items()
    ]
    return [f"{setting:22}{source}" for setting, source in rows]


def _format_nodes(num_nodes: int) -> str:
    return "1 node," if num_nodes == 1 else f"{format_count(num_nodes)} nodes, together"


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _summarize_interval(scenario: FailureScenario, wall_s: float) -> dict[str, float]:
    best = failure_model.find_best_interval_steps(scenario)
    highest = failure_model.compute_goodput(scenario, best * scenario.step_s)
    current = failure_model.compute_goodput(scenario, scenario.interval_s)
    return {
        "best_s": best * scenario.step_s,
        "best_steps": best,
        "best_goodput": highest,
        "young_s": failure_model.compute_young_interval(scenario),
        "daly_s": failure_model.compute_daly_interval(scenario),
        "current_s": scenario.interval_s,
        "current_goodput": current,
        "loses_goodput": highest - current,
        "loses_s": wall_s * (1 - current / highest),
    }


def _compute_shares(ledger: TimeBreakdown[FloatOrArray]) -> dict[str, FloatOrArray]:
    parts = {"uptime": ledger.uptime} | {
        name: value for name, value in vars(ledger).items() if name != "failures"
    }
    return {name: seconds / ledger.wall_time for name, seconds in parts.items()}
