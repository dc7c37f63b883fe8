"""Goodput over the interval between checkpoints: the formula, simulated points, and the optimum."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from hlat.config.errors import ConfigError
from hlat.planning import failures
from hlat.planning.failures import Scenario
from hlat.reporting.figures import LIGHT, MUTED, SERIES, STYLE, alone, element
from hlat.reporting.wording import duration

_TIMES: dict[float, str] = dict(
    [
        *((10.0**power, f"{10.0**power:g} s") for power in range(-3, 1)),
        *((seconds, f"{seconds} s") for seconds in (3, 10, 30)),
        *((60 * minutes, f"{minutes} min") for minutes in (1, 3, 10, 30)),
        *((3600 * hours, f"{hours} h") for hours in (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)),
    ]
)
_REACH = 20
_POINTS = 9


@dataclass(frozen=True)
class Sweep:
    """Goodput at other intervals.

    Attributes:
        best_s: The best interval.
        current_s: That of the scenario.
        intervals_s: Where the formula is drawn, in rising order.
        formula: Its goodput there.
        simulated: Interval, goodput and standard error of each simulated point.
    """

    best_s: float
    current_s: float
    intervals_s: list[float]
    formula: list[float]
    simulated: list[tuple[float, float, float]]


def sweep(scenario: Scenario, trials: int, seed: int) -> Sweep:
    """Return what the figure shows, a factor of 20 around the best interval and the scenario's."""
    best, current = failures.best_steps(scenario) * scenario.step_s, scenario.interval_s
    low = max(min(best / _REACH, current), scenario.step_s, scenario.save_write_s)
    high = max(min(best * _REACH, 3 * scenario.mtbf_s), current, low * 2)
    intervals = [float(interval) for interval in np.geomspace(low, high, 200)]
    points = []
    for interval in np.geomspace(low, high, _POINTS):
        every = math.ceil(interval / scenario.step_s)
        point = replace(scenario, every_steps=every, steps=max(scenario.steps, every))
        try:
            failures.refuse_impossible(point, trials)
        except ConfigError:
            continue  # too many failures to draw: the formula stands alone there
        ledger = failures.simulate(point, trials, seed)
        points.append((point.interval_s, *failures.pooled(ledger.training, ledger.wall)))
    formula = [failures.goodput(scenario, interval) for interval in intervals]
    return Sweep(best, current, intervals, formula, points)


def write(file: Path, shown: Sweep) -> None:
    """Draw the figure into an SVG or PNG file.

    Raises:
        OSError: The file cannot be written.
    """
    vector = file.suffix == ".svg"
    colours = {colour: colour for colour in LIGHT} if vector else LIGHT
    style = {key: colours.get(value, value) for key, value in STYLE.items()}
    with matplotlib.rc_context({**style, "svg.hashsalt": "failures"}):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, shown, colours)
        figure.legend(loc="outside upper left", ncols=2, fontsize=9)
        if vector:
            file.write_text(alone(element(figure, _describe(shown))))
        else:
            figure.savefig(file, dpi=160, facecolor="white")


def _draw(axes: Axes, shown: Sweep, colours: Mapping[str, str]) -> None:
    line, dots, muted = (colours[colour] for colour in (SERIES[0], SERIES[1], MUTED))
    axes.plot(shown.intervals_s, [100 * g for g in shown.formula], color=line, label="formula")
    if shown.simulated:
        places, values, errors = zip(*shown.simulated, strict=True)
        axes.errorbar(
            places,
            [100 * value for value in values],
            yerr=[200 * error for error in errors],
            color=dots,
            linestyle="none",
            marker="o",
            markersize=4,
            capsize=2,
            label="simulation, 2 standard errors",
        )
    for place, dashes, word in ((shown.best_s, "dashed", "best"), (shown.current_s, ":", "this")):
        label = f"{word}: {duration(place)}"
        axes.axvline(place, color=muted, linestyle=dashes, linewidth=1, zorder=1, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("training between two checkpoints")
    axes.set_ylabel("goodput, % of wall time")
    axes.xaxis.set_major_locator(FixedLocator(list(_TIMES)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _TIMES[at]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))


def _describe(shown: Sweep) -> str:
    return (
        f"Goodput over the interval between checkpoints, {duration(shown.intervals_s[0])} to "
        f"{duration(shown.intervals_s[-1])}: best, {max(shown.formula):.2%}, at "
        f"{duration(shown.best_s)}."
    )
