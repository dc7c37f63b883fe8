"""A plan for failures as JSON and as text.

The text compares the formula with the simulation and lists all assumptions with their sources.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.figures.page_templates import render_text
from hlat.plan import failure_model
from hlat.plan.failure_model import FailureScenario, FloatOrArray, TimeBreakdown

_TEMPLATE = Path(__file__).with_name("templates") / "failures.txt.j2"
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

    `simulated` contains the trials, and `sources` the source of each value of the scenario.
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
    lost_points = f"{100 * plan['interval']['loses_goodput']:.2f}"
    return render_text(_TEMPLATE, plan=plan, labels=_LABELS, lost_points=lost_points)


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
