"""Best learning rates of a study with a grid of rates, and their movement over a size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hlat.config.lr_grid import LR_KEY
from hlat.config.study import Direction, LrGridConfig, StudyConfig
from hlat.study.lr_optimum import (
    LrCurve,
    LrOptimum,
    OptimumStatus,
    find_lr_optimum,
    sample_lr_optima,
)
from hlat.study.paired_test import PointRuns
from hlat.study.study_analysis import Point, format_point
from hlat.tracking.text_format import UNKNOWN

_NUM_MORE_RATES = 2
"""Rates that an extension of the grid adds."""
TUNING_CAPTION = "Best learning rates; the interval does not contain the error of the parabola"
_NUM_SAMPLES = 10_000
_GROWTH = 8.0
"""Factor of the size over which the movement is stated."""


@dataclass(frozen=True)
class LrMovement:
    """Movement when the size grows by a factor of 8, in steps of the grid, with its interval.

    `exponent` is the slope of log(best rate) over log(size): -1 if the rate is inverse to the size.
    """

    steps: float
    low: float
    high: float
    exponent: float


_NO_MOVEMENT = LrMovement(math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class LrTuning:
    """Runs that differ in learning rate and seed only.

    `scale` is the value of study.lr_grid.transfer_over; NaN without one.
    """

    point: Point
    curve: LrCurve
    optimum: LrOptimum
    scale: float = math.nan


@dataclass(frozen=True)
class Transfer:
    """Points that differ in their scale, and the movement of their optimum; None if unknown."""

    point: Point
    tunings: Sequence[LrTuning]
    movement: LrMovement | None


def analyze_tunings(
    points: Mapping[Point, PointRuns], design: StudyConfig, scales: Mapping[Point, float]
) -> list[LrTuning]:
    """Return the optimum of each group of points that differ in the learning rate only.

    `scales` are the values of study.lr_grid.transfer_over by point. The list is empty if the design
    has no grid.
    """
    if design.lr_grid.factor is None:
        return []
    groups: dict[Point, dict[float, PointRuns]] = {}
    group_scales: dict[Point, float] = {}
    for point, runs in points.items():
        rate = dict(point).get(LR_KEY)
        if rate is not None:
            group = tuple(pair for pair in point if pair[0] != LR_KEY)
            groups.setdefault(group, {})[float(rate)] = runs
            group_scales[group] = scales.get(point, math.nan)
    tunings = []
    for group, by_rate in groups.items():
        curve = _build_curve(by_rate, design.direction)
        optimum = find_lr_optimum(curve, 1 - design.alpha)
        tunings.append(LrTuning(group, curve, optimum, group_scales[group]))
    return tunings


def analyze_transfer(tunings: Sequence[LrTuning], design: StudyConfig) -> list[Transfer]:
    """Return the movement of the optimum over the scales, for each setting of other factors.

    Factors of the section of study.lr_grid.transfer_over that have one value at each scale, such as
    the number of heads, vary with it, so they are not distinguished.
    """
    grid = design.lr_grid
    if grid.transfer_over is None or grid.factor is None:
        return []
    dependent = _find_dependent_factors(tunings, grid.transfer_over)
    series: dict[Point, list[LrTuning]] = {}
    for one in tunings:
        others = tuple(pair for pair in one.point if pair[0] not in dependent)
        series.setdefault(others, []).append(one)
    result = []
    for point, members in series.items():
        members = sorted(members, key=lambda one: one.scale)
        found = [one for one in members if one.optimum.status is OptimumStatus.found]
        found = [one for one in found if one.scale > 0]
        movement = compute_movement(
            [one.scale for one in found],
            [one.optimum for one in found],
            grid.factor,
            1 - design.alpha,
        )
        result.append(Transfer(point, members, movement))
    return result


def _find_dependent_factors(tunings: Sequence[LrTuning], over: str) -> set[str]:
    """Return the factors of the section of `over` with one value at each scale."""
    section = f"{over.partition('.')[0]}."
    values: dict[str, dict[float, set[str]]] = {}
    for one in tunings:
        for key, value in one.point:
            values.setdefault(key, {}).setdefault(one.scale, set()).add(value)
    return {
        key
        for key, by_scale in values.items()
        if key.startswith(section) and all(len(each) == 1 for each in by_scale.values())
    }


def merge_grids(designs: Sequence[StudyConfig], design: StudyConfig) -> LrGridConfig:
    """Return the grid of a design with the largest extension among runs of the same grid."""
    grid = design.lr_grid
    grids = [other.lr_grid for other in designs]
    same = [
        other for other in grids if (other.factor, other.center) == (grid.factor, grid.center)
    ] or [grid]
    below, above = max(one.below for one in same), max(one.above for one in same)
    return LrGridConfig(grid.factor, grid.center, below, above, grid.transfer_over)


def format_tuning(one: LrTuning, design: StudyConfig) -> str:
    """Return the optimum as a sentence with its override, or why there is none with a remedy."""
    optimum = one.optimum
    prefix = f"{format_point(one.point)}: " if one.point else ""
    if optimum.status is OptimumStatus.found:
        rate = format_rate(optimum.rate)
        return (
            f"{prefix}the best {LR_KEY} is {rate} ({_format_confidence(design)} interval "
            f"{format_rate_interval(optimum)}; {_format_seeds(optimum.num_seeds)}); use "
            f"{LR_KEY}={rate}{_format_wide(optimum)}{_format_diverged(one.curve)}"
        )
    return f"{prefix}no optimum: {_explain_missing(one, design)}{_format_diverged(one.curve)}"


def format_transfer(transfer: Transfer, design: StudyConfig) -> str:
    """Return the movement of the optimum as a sentence."""
    over = design.lr_grid.transfer_over
    prefix = f"{format_point(transfer.point)}: " if transfer.point else ""
    missing = [
        f"{one.scale:g}"
        for one in transfer.tunings
        if one.optimum.status is not OptimumStatus.found
    ]
    suffix = f"; without {over}={','.join(missing)}, which has no optimum" if missing else ""
    movement = transfer.movement
    if movement is None:
        return f"{prefix}the movement over {over} is unknown: fewer than two optima{suffix}"
    return (
        f"{prefix}the best {LR_KEY} moves by {movement.steps:+.2f} grid steps "
        f"({_format_confidence(design)} interval {movement.low:+.2f} to {movement.high:+.2f}) "
        f"when {over} grows by a factor of 8{suffix}"
    )


def build_tuning_table(tunings: Sequence[LrTuning]) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and a row for each optimum."""
    rows = [
        [
            format_point(one.point),
            one.optimum.status.value,
            format_rate(one.optimum.rate),
            format_rate_interval(one.optimum),
            UNKNOWN if math.isnan(one.optimum.value) else f"{abs(one.optimum.value):.4f}",
            str(one.optimum.num_seeds),
            str(int(one.curve.num_diverged.sum())),
        ]
        for one in tunings
    ]
    headers = ["Point", "Optimum", LR_KEY, "Interval", "Metric there", "Seeds", "Diverged"]
    return headers, rows


def summarize_tunings(tunings: Sequence[LrTuning], transfers: Sequence[Transfer]) -> dict[str, Any]:
    """Return optima and movements as JSON; numbers that do not exist are null."""
    return {
        "optima": [
            {
                "point": dict(one.point),
                "status": one.optimum.status.name,
                "lr": _round(one.optimum.rate),
                "low": _round(one.optimum.low),
                "high": _round(one.optimum.high),
                "num_seeds": one.optimum.num_seeds,
                "override": _build_override(one.optimum),
            }
            for one in tunings
        ],
        "movements": [
            {"point": dict(one.point)}
            | {key: _round(value) for key, value in vars(one.movement or _NO_MOVEMENT).items()}
            for one in transfers
        ],
    }


def format_rate(rate: float) -> str:
    """Return a learning rate with three digits."""
    return UNKNOWN if math.isnan(rate) else f"{rate:.3g}"


def format_rate_interval(optimum: LrOptimum) -> str:
    """Return the interval of an optimum."""
    if math.isnan(optimum.low):
        return UNKNOWN
    return f"{format_rate(optimum.low)} to {format_rate(optimum.high)}"


def _build_curve(by_rate: Mapping[float, PointRuns], direction: Direction) -> LrCurve:
    """Return the metrics of all seeds, with the sign with which lower is better."""
    rates = sorted(by_rate)
    seeds = sorted({seed for runs in by_rate.values() for seed in (*runs.values, *runs.diverged)})
    sign = -1.0 if direction is Direction.maximize else 1.0
    values = [[sign * by_rate[rate].values.get(seed, math.nan) for rate in rates] for seed in seeds]
    return LrCurve(
        np.array(rates),
        np.array(values).reshape(len(seeds), len(rates)),
        np.array([len(by_rate[rate].diverged) for rate in rates]),
    )


def _explain_missing(one: LrTuning, design: StudyConfig) -> str:
    optimum, grid = one.optimum, design.lr_grid
    rate = format_rate(optimum.center)
    match optimum.status:
        case OptimumStatus.below:
            count = grid.below + _NUM_MORE_RATES
            return (
                f"the lowest rate {rate} is the best; extend the grid: repeat the command with "
                f"study.lr_grid.below={count}"
            )
        case OptimumStatus.above:
            count = grid.above + _NUM_MORE_RATES
            return (
                f"the highest rate {rate} is the best; extend the grid: repeat the command with "
                f"study.lr_grid.above={count}"
            )
        case OptimumStatus.unstable:
            return (
                f"{rate} is the best and runs with the next rate diverged; repeat the command with "
                f"study.lr_grid.center={rate} and a smaller study.lr_grid.factor"
            )
        case OptimumStatus.not_convex:
            first, last = map(format_rate, (optimum.fitted[0], optimum.fitted[-1]))
            return (
                f"the parabola of the rates {first} to {last} has no significant minimum among "
                "them; add seeds, or set a larger study.lr_grid.factor"
            )
        case _:
            return (
                "fewer than three rates, or no seed, have all their runs; repeat the command to "
                "train the missing ones"
            )


def _format_wide(optimum: LrOptimum) -> str:
    """Return a warning if the interval exceeds the rates that the parabola was fitted to."""
    if optimum.low < optimum.fitted[0] or optimum.high > optimum.fitted[-1]:
        return "; the interval exceeds the fitted rates, so add seeds before you rely on it"
    return ""


def _format_diverged(curve: LrCurve) -> str:
    rates = [format_rate(rate) for rate in curve.rates[curve.num_diverged > 0]]
    return f"; excluded, because runs diverged: {', '.join(rates)}" if rates else ""


def _format_confidence(design: StudyConfig) -> str:
    return f"{100 * (1 - design.alpha):.3g}%"


def _format_seeds(count: int) -> str:
    return f"{count} {'seed' if count == 1 else 'seeds'}"


def _build_override(optimum: LrOptimum) -> str | None:
    is_found = optimum.status is OptimumStatus.found
    return f"{LR_KEY}={format_rate(optimum.rate)}" if is_found else None


def _round(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def compute_movement(
    scales: Sequence[float],
    optima: Sequence[LrOptimum],
    factor: float,
    confidence: float = 0.95,
    seed: int = 0,
) -> LrMovement | None:
    """Return the movement of optima with the status `found`; None for fewer than two sizes.

    The slope is that of least squares. Its interval contains the quantiles of the slopes of 10,000
    samples of all optima (`sample_lr_optima`), so it has the errors of the runs, but not the
    deviation of the optima from a line. It is NaN if the optima have no interval.
    """
    if len({*scales}) < 2:
        return None
    x = np.log2(scales)
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    slope = float(weights @ np.log2([one.rate for one in optima]))
    generator = np.random.default_rng(seed)
    samples = np.array([sample_lr_optima(one, _NUM_SAMPLES, generator) for one in optima])
    with np.errstate(invalid="ignore"):
        slopes = weights @ samples
    slopes = slopes[~np.isnan(slopes)]
    steps_per_slope = math.log2(_GROWTH) / math.log2(factor)
    tail = (1 - confidence) / 2
    low, high = (
        np.quantile(slopes, [tail, 1 - tail], method="nearest")
        if len(slopes)
        else (math.nan, math.nan)
    )
    return LrMovement(
        slope * steps_per_slope, float(low) * steps_per_slope, float(high) * steps_per_slope, slope
    )
