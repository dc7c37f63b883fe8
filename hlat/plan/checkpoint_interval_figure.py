"""Goodput over the interval between checkpoints: formula, simulation and optimum."""

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError
from hlat.figures.report_figure import MUTED, SERIES, ReportFigure
from hlat.plan import failure_model
from hlat.plan.failure_model import FailureScenario
from hlat.tracking.text_format import format_duration

_TICK_LABELS = {
    count * seconds: f"{count} {unit}"
    for unit, seconds, counts in (
        ("s", 1, (0.001, 0.01, 0.1, 1, 3, 10, 30)),
        ("min", 60, (1, 3, 10, 30)),
        ("h", 3600, (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)),
    )
    for count in counts
}
_SWEEP_FACTOR = 20
"""Ratio of the limits of the axis and the best interval."""
_NUM_SIMULATED_POINTS = 9


def build_interval_figure(scenario: FailureScenario, trials: int, seed: int) -> ReportFigure:
    """Return a figure of the goodput over the interval, around the best and the scenario's."""
    best = failure_model.find_best_interval_steps(scenario) * scenario.step_s
    current = scenario.interval_s
    low = max(min(best / _SWEEP_FACTOR, current), scenario.step_s, scenario.save_write_s)
    high = max(min(best * _SWEEP_FACTOR, 3 * scenario.mtbf_s), current, low * 2)
    intervals = np.geomspace(low, high, 200).tolist()
    formula = [failure_model.compute_goodput(scenario, interval) for interval in intervals]
    simulated = _simulate_intervals(scenario, low, high, trials, seed)

    def draw() -> Figure:
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(intervals, 100 * np.array(formula), color=SERIES[0], label="formula")
        if len(simulated):
            axes.errorbar(
                simulated[:, 0],
                100 * simulated[:, 1],
                yerr=200 * simulated[:, 2],
                color=SERIES[1],
                linestyle="none",
                marker="o",
                markersize=4,
                capsize=2,
                label="simulation, 2 standard errors",
            )
        for interval, dashes, name in ((best, "dashed", "best"), (current, ":", "current")):
            label = f"{name}: {format_duration(interval)}"
            axes.axvline(
                interval, color=MUTED, linestyle=dashes, linewidth=1, zorder=1, label=label
            )
        axes.set_xscale("log")
        axes.set_xlabel("training between two checkpoints")
        axes.set_ylabel("goodput, % of wall time")
        axes.xaxis.set_major_locator(FixedLocator(list(_TICK_LABELS)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _TICK_LABELS[x]))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        figure.legend(loc="outside upper left", ncols=2, fontsize=9)
        return figure

    alt_text = (
        f"Goodput over the interval between checkpoints, {format_duration(intervals[0])} to "
        f"{format_duration(intervals[-1])}: best, {max(formula):.2%}, at {format_duration(best)}."
    )
    return ReportFigure("failures", alt_text, draw)


def _simulate_intervals(
    scenario: FailureScenario, low: float, high: float, trials: int, seed: int
) -> NDArray[np.float64]:
    """Return interval, goodput and standard error of simulated points, [n, 3]."""
    simulated = []
    for interval in np.geomspace(low, high, _NUM_SIMULATED_POINTS):
        every = math.ceil(interval / scenario.step_s)
        point = replace(scenario, every_steps=every, steps=max(scenario.steps, every))
        with suppress(ConfigError):  # too many failures to simulate
            failure_model.validate_scenario(point, trials)
            times = failure_model.simulate_failures(point, trials, seed)
            goodput = failure_model.compute_pooled_fraction(times.training, times.wall_time)
            simulated.append((point.interval_s, *goodput))
    return np.array(simulated)
