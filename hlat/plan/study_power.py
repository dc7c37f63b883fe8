"""Differences that the seeds of a study can detect, and the seeds that its difference needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hlat.config.lr_grid import LR_KEY
from hlat.config.run import Config
from hlat.config.seeds import SEED_KEYS, format_seeds
from hlat.config.study import StudyConfig
from hlat.study.power import MAX_SEEDS, compute_detectable_difference
from hlat.study.rate_comparison import CRITERIA, compares_over_rates
from hlat.study.sequential_test import compute_sequential_detectable_difference
from hlat.study.study_analysis import Point, find_baselines
from hlat.tracking.text_format import format_duration, format_setting

_MAX_SEQUENTIAL_SEEDS = 64
"""Largest number of seeds of a study that tests after each; its tests are simulated."""


@dataclass(frozen=True)
class PowerPlan:
    """Smallest detectable difference by number of seeds.

    Attributes:
        spread: Standard deviation over seeds of the difference between two points.
        num_comparisons: Comparisons that the level of the test is divided by.
        differences: Smallest detectable difference by number of seeds.
        num_required: Seeds that detect study.smallest_difference; None: unknown, or too many.
        num_affordable: Seeds within study.budget_hours; None: no budget, or an unknown cost.
    """

    spread: float
    num_comparisons: int
    differences: dict[int, float]
    num_required: int | None = None
    num_affordable: int | None = None


def count_comparisons(points: Sequence[Mapping[str, str]], configs: Sequence[Config]) -> int:
    """Return the number of points, over all seeds, that have a baseline.

    `points` are the values by key, and `configs` the configurations of the points.

    A study with a grid of learning rates compares its settings by two criteria if it has a
    baseline, else none.
    """
    design = configs[0].study
    has_grid = design.lr_grid.factor is not None
    if has_grid and not compares_over_rates(design):
        return 0
    excluded = {*SEED_KEYS, LR_KEY} if has_grid else {*SEED_KEYS}
    unique: dict[Point, None] = {}
    for point in _name_choices(points, configs):
        factors = ((key, _normalize(value)) for key, value in point.items() if key not in excluded)
        unique[tuple(factors)] = None
    baseline = {key: _normalize(value) for key, value in design.baseline.items()}
    return len(find_baselines(list(unique), baseline)) * (len(CRITERIA) if has_grid else 1)


def plan_power(
    design: StudyConfig,
    spread: float,
    num_seeds: int,
    num_comparisons: int,
    hours: float | None = None,
) -> PowerPlan:
    """Return what the seeds of a study, up to four times as many, and its budget can detect.

    `hours` is the duration of all runs, one after the other.
    """
    function = (
        compute_sequential_detectable_difference
        if design.stop_worse
        else compute_detectable_difference
    )

    def detect(count: int) -> float:
        return function(spread, count, design.alpha / max(1, num_comparisons), design.power)

    affordable = None
    if hours and design.budget_hours is not None:
        affordable = min(MAX_SEEDS, math.floor(design.budget_hours / (hours / num_seeds)))
    counts = {n for n in (num_seeds, 3, 5, 8, 2 * num_seeds, 4 * num_seeds) if n >= num_seeds}
    counts |= {affordable or 0}
    differences = {count: detect(count) for count in sorted(counts) if count > 1}
    limit = _MAX_SEQUENTIAL_SEEDS if design.stop_worse else MAX_SEEDS
    required = _find_required_seeds(detect, design.smallest_difference, limit)
    return PowerPlan(spread, num_comparisons, differences, required, affordable)


def _find_required_seeds(
    detect: Callable[[int], float], difference: float | None, limit: int
) -> int | None:
    """Return the fewest seeds that detect a difference; None without one, or above the limit."""
    if difference is None:
        return None
    low, high = 1, 2
    while detect(high) > difference:
        if high >= limit:
            return None
        low, high = high, min(limit, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if detect(middle) <= difference else (middle, high)
    return high


def format_undecidable(
    points: Sequence[Mapping[str, str]], configs: Sequence[Config]
) -> str | None:
    """Return a sentence if the seeds of a study do not detect study.smallest_difference.

    None: they do, or the design has no difference, no spread or no comparison.
    """
    design, num_seeds = configs[0].study, len({format_seeds(point) for point in points})
    wanted, count = design.smallest_difference, count_comparisons(points, configs)
    if wanted is None or design.spread is None or not count or num_seeds < 2:
        return None
    power = plan_power(design, design.spread, num_seeds, count)
    smallest = power.differences[num_seeds]
    if smallest <= wanted:
        return None
    needed = power.num_required or "more than can be computed"
    return (
        f"{num_seeds} seeds detect a difference of {smallest:.2g} with {design.power:.0%} power; "
        f"study.smallest_difference={wanted:g} needs {needed}"
    )


def format_required_seeds(
    design: StudyConfig, power: PowerPlan, hours_per_seed: float | None
) -> list[str]:
    """Return the seeds for study.smallest_difference, their time, and those in the budget."""
    wanted, budget, affordable = (
        design.smallest_difference,
        design.budget_hours,
        power.num_affordable,
    )
    if wanted is None:
        return []
    if power.num_required is None:
        line = f"study.smallest_difference={wanted:g} needs more seeds than can be computed"
    else:
        line = f"study.smallest_difference={wanted:g} needs {power.num_required} seeds"
        if hours_per_seed is not None:
            line += f", {format_duration(3600 * hours_per_seed * power.num_required)} in all"
    if affordable is None:
        return [line]
    if power.num_required is not None and power.num_required <= affordable:
        return [f"{line}; study.budget_hours={budget:g} has {affordable}"]
    detected = power.differences.get(affordable)
    return [
        line,
        f"NOT DECIDABLE within study.budget_hours={budget:g}, which has {affordable} "
        f"{'seed' if affordable == 1 else 'seeds'}"
        + ("" if detected is None else f" and detects {detected:.2g}"),
    ]


def _name_choices(
    points: Sequence[Mapping[str, str]], configs: Sequence[Config]
) -> list[dict[str, str]]:
    """Return the points with the names in the configuration in place of choices of groups.

    A report and a baseline have these names, such as adamw for adamw_tiny. If choices have the same
    name, they are not replaced.
    """
    named = [{**point} for point in points]
    for key in points[0]:
        names = [getattr(getattr(config, key, None), "name", None) for config in configs]
        if None not in names and len({*names}) == len({point[key] for point in points}):
            for point, name in zip(named, names, strict=True):
                point[key] = format_setting(name)
    return named


def _normalize(value: object) -> str:
    """Return the same text for equal values, such as 1e-3 and 0.001."""
    if value is None:
        return "null"
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value).lower()
