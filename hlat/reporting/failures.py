"""What a plan for failures says, as JSON and as a table.

Formula and simulation stand side by side, so that each can be judged by the other, and every number
that they follow from stands below with its source.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.planning import failures
from hlat.planning.failures import Ledger, Number, Scenario
from hlat.reporting.wording import duration, whole

_LABELS = {
    "uptime": "uptime",
    "training": "goodput: steps that survive",
    "saving": "saves",
    "lost": "lost steps, replayed",
    "detecting": "detection",
    "responding": "response",
    "restarting": "restart and load",
}
_SPREAD = (5, 95)


def summarise(
    scenario: Scenario, simulated: Ledger[NDArray[np.float64]], sources: Mapping[str, str]
) -> dict[str, Any]:
    """Return all numbers of a plan, as JSON has them; shares are of the wall time.

    Args:
        scenario: What was planned for.
        simulated: Its trials.
        sources: Where each number of the scenario comes from.
    """
    expected = failures.expect(scenario)
    return {
        "scenario": {
            name: {"value": value, "source": sources[name]}
            for name, value in asdict(scenario).items()
        },
        "system_mtbf_s": scenario.mtbf_s,
        "formula": {**_shares(expected), "wall_s": expected.wall, "failures": expected.failures},
        "first_order_goodput": failures.first_order(scenario, scenario.interval_s),
        "simulation": _simulation(simulated),
        "interval": _interval(scenario, expected.wall),
    }


def table(plan: Mapping[str, Any]) -> list[str]:
    """Return the lines that tell a plan of `summarise`."""
    settings = {name: given["value"] for name, given in plan["scenario"].items()}
    simulation = plan["simulation"]
    lines = [
        f"{_nodes(settings['nodes'])} a failure every {duration(plan['system_mtbf_s'])};"
        f" {whole(settings['steps'])} steps of {settings['step_s']:g} s, a save every"
        f" {whole(settings['every_steps'])}",
        "",
        f"{'':30}{'formula':>12}{'simulation':>12}   5% to 95% of "
        f"{whole(simulation['trials'])} runs",
    ]
    for name, label in _LABELS.items():
        lines.append(_row(label, name, plan, lambda share: f"{share:.2%}"))
    lines.append(_row("wall time, days", "wall_s", plan, lambda wall: f"{wall / 86400:.2f}"))
    lines.append(_row("failures", "failures", plan, lambda count: f"{count:.4g}"))
    return [*lines, "", *_advice(plan), "", *_assumptions(plan["scenario"])]


def _simulation(ledger: Ledger[NDArray[np.float64]]) -> dict[str, Any]:
    shares, mean = _shares(ledger), failures.average(ledger)
    measures = {**shares, "wall_s": ledger.wall, "failures": ledger.failures}
    pooled = {
        name: failures.pooled(values * ledger.wall, ledger.wall) for name, values in shares.items()
    }
    return {
        "trials": len(ledger.wall),
        "mean": {
            **{name: share for name, (share, _) in pooled.items()},
            "wall_s": mean.wall,
            "failures": mean.failures,
        },
        "standard_error": {name: error for name, (_, error) in pooled.items()},
        **{
            f"percentile_{at}": {
                name: float(np.percentile(values, at)) for name, values in measures.items()
            }
            for at in _SPREAD
        },
    }


def _row(label: str, name: str, plan: Mapping[str, Any], write: Callable[[float], str]) -> str:
    simulation = plan["simulation"]
    places = (plan["formula"], simulation["mean"])
    formula, mean = (write(place[name]) for place in places)
    low, high = (write(simulation[f"percentile_{at}"][name]) for at in _SPREAD)
    return f"{label:30}{formula:>12}{mean:>12}   {low} to {high}"


def _advice(plan: Mapping[str, Any]) -> list[str]:
    interval = plan["interval"]
    best, now = interval["best_steps"], plan["scenario"]["every_steps"]["value"]
    lines = [
        f"best interval   {whole(best)} steps, {duration(interval['best_s'])}: goodput "
        f"{interval['best_goodput']:.2%} in a long run (Young {duration(interval['young_s'])}, "
        f"Daly {duration(interval['daly_s'])})"
    ]
    this = f"this interval   {whole(now)} steps, {duration(interval['current_s'])}"
    points = f"{100 * interval['loses_goodput']:.2f}"
    if float(points) == 0:
        return [*lines, f"{this}: as good"]
    lost = duration(interval["loses_s"])
    return [*lines, f"{this}: loses {points} points, {lost} of this run"]


def _assumptions(scenario: Mapping[str, Any]) -> list[str]:
    words = {name: f"{name}={_plain(given['value'])}" for name, given in scenario.items()}
    return [f"{words[name]:22}{given['source']}" for name, given in scenario.items()]


def _nodes(number: int) -> str:
    return "1 node," if number == 1 else f"{whole(number)} nodes, together"


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _interval(scenario: Scenario, wall_s: float) -> dict[str, float]:
    best = failures.best_steps(scenario)
    highest = failures.goodput(scenario, best * scenario.step_s)
    current = failures.goodput(scenario, scenario.interval_s)
    return {
        "best_s": best * scenario.step_s,
        "best_steps": best,
        "best_goodput": highest,
        "young_s": failures.young_interval(scenario),
        "daly_s": failures.daly_interval(scenario),
        "current_s": scenario.interval_s,
        "current_goodput": current,
        "loses_goodput": highest - current,
        "loses_s": wall_s * (1 - current / highest),
    }


def _shares(ledger: Ledger[Number]) -> dict[str, Number]:
    parts = {"uptime": ledger.up} | {
        name: value for name, value in vars(ledger).items() if name != "failures"
    }
    return {name: seconds / ledger.wall for name, seconds in parts.items()}
