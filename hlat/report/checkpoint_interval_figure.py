"""Goodput over the interval between checkpoints: formula, simulation and optimum."""

import math
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from hlat.config.config_errors import ConfigError
from hlat.plan import failure_model
from hlat.plan.failure_model import FailureScenario
from hlat.report.figures import MUTED, SERIES, ReportFigure
from hlat.report.text_format import format_duration

_TICK_LABELS: dict[float, str] = dict(
    [
        *((10.0**power, f"{10.0**power:g} s") for power in range(-3, 1)),
        *((seconds, f"{seconds} s") for seconds in (3, 10, 30)),
        *((60 * minutes, f"{minutes} min") for minutes in (1, 3, 10, 30)),
        *((3600 * hours, f"{hours} h") for hours in (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)),
    ]
)
_SWEEP_FACTOR = 20
_NUM_SIMULATED_POINTS = 9


@dataclass(frozen=True)
class IntervalSweep:
    """Goodput at different checkpoint intervals in seconds.

    Attributes:
        best_s: Best interval.
        current_s: Interval of the scenario.
        intervals_s: Intervals of `formula`, ascending.
        formula: Goodput by the formula.
        simulated: Interval, goodput and standard error of each simulated point.
    """

    best_s: float
    current_s: float
    intervals_s: list[float]
    formula: list[float]
    simulated: list[tuple[float, float, float]]


def sweep_checkpoint_intervals(scenario: FailureScenario, trials: int, seed: int) -> IntervalSweep:
    """Return the goodput within a factor of 20 of the best interval and of the scenario's."""
    best = failure_model.find_best_interval_steps(scenario) * scenario.step_s
    current = scenario.interval_s
    low = max(min(best / _SWEEP_FACTOR, current), scenario.step_s, scenario.save_write_s)
    high = max(min(best * _SWEEP_FACTOR, 3 * scenario.mtbf_s), current, low * 2)
    intervals = [float(interval) for interval in np.geomspace(low, high, 200)]
    simulated = []
    for interval in np.geomspace(low, high, _NUM_SIMULATED_POINTS):
        every = math.ceil(interval / scenario.step_s)
        point = replace(scenario, every_steps=every, steps=max(scenario.steps, every))
        try:
            failure_model.validate_scenario(point, trials)
        except ConfigError:
            continue  # too many failures to simulate
        times = failure_model.simulate_failures(point, trials, seed)
        goodput = failure_model.compute_pooled_fraction(times.training, times.wall_time)
        simulated.append((point.interval_s, *goodput))
    formula = [failure_model.compute_goodput(scenario, interval) for interval in intervals]
    return IntervalSweep(best, current, intervals, formula, simulated)


def build_interval_figure(sweep: IntervalSweep) -> ReportFigure:
    """Return a figure of the goodput over the checkpoint interval."""

    def draw() -> Figure:
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(
            sweep.intervals_s, [100 * g for g in sweep.formula], color=SERIES[0], label="formula"
        )
        if sweep.simulated:
            intervals, values, errors = zip(*sweep.simulated, strict=True)
            axes.errorbar(
                intervals,
                [100 * value for value in values],
                yerr=[200 * error for error in errors],
                color=SERIES[1],
                linestyle="none",
                marker="o",
                markersize=4,
                capsize=2,
                label="simulation, 2 standard errors",
            )
        for interval, dashes, name in (
            (sweep.best_s, "dashed", "best"),
            (sweep.current_s, ":", "current"),
        ):
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
        f"Goodput over the interval between checkpoints, {format_duration(sweep.intervals_s[0])} "
        f"to {format_duration(sweep.intervals_s[-1])}: best, {max(sweep.formula):.2%}, at "
        f"{format_duration(sweep.best_s)}."
    )
    return ReportFigure("failures", alt_text, draw)
