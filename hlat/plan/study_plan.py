"""Plan of a study: runs, cost, and the differences that its seeds can detect."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hlat.config.batch_steps import count_tokens
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.config.study import StudyConfig
from hlat.plan import step_time
from hlat.plan.run_cost import compute_run_flops, compute_run_seconds
from hlat.study.power import compute_detectable_difference
from hlat.study.sequential_test import compute_sequential_detectable_difference
from hlat.study.study_analysis import Point, find_baselines

SEED_KEY = "run.seed"


@dataclass(frozen=True)
class RunCost:
    """Cost of a run; hours and price are None if speed or price is unknown."""

    tokens: int
    flops: float
    hours: float | None
    usd: float | None


@dataclass(frozen=True)
class PowerPlan:
    """Smallest detectable difference by number of seeds.

    `spread` is the standard deviation over seeds of the difference between two points.
    """

    spread: float
    num_comparisons: int
    differences: dict[int, float]


def compute_run_cost(config: Config, measured_tokens_per_second: float) -> RunCost:
    """Return the cost of a run from a measured speed, or from the predicted one instead of NaN."""
    tokens = count_tokens(compute_total_steps(config), config.batch)
    flops = compute_run_flops(config)
    if measured_tokens_per_second > 0:
        hours = tokens / measured_tokens_per_second / 3600
    else:
        try:
            hours = compute_run_seconds(config, step_time.predict_step_time) / 3600
        except ConfigError:
            return RunCost(tokens, flops, None, None)
    price = config.hardware.price_usd_per_hour
    usd = None if price is None else hours * config.hardware.nodes * price
    return RunCost(tokens, flops, hours, usd)


def count_comparisons(points: Sequence[Mapping[str, str]], design: StudyConfig) -> int:
    """Return the number of points, over all seeds, that have a baseline.

    A study with a grid of learning rates compares none.
    """
    if design.lr_grid.factor is not None:
        return 0
    unique: dict[Point, None] = {}
    for point in points:
        factors = ((key, _normalize(value)) for key, value in point.items() if key != SEED_KEY)
        unique[tuple(factors)] = None
    baseline = {key: _normalize(value) for key, value in design.baseline.items()}
    return len(find_baselines(list(unique), baseline))


def plan_power(
    design: StudyConfig, spread: float, num_seeds: int, num_comparisons: int
) -> PowerPlan:
    """Return what the seeds of a study, and up to four times as many, can detect."""
    detect = (
        compute_sequential_detectable_difference
        if design.stop_worse
        else compute_detectable_difference
    )
    alpha = design.alpha / max(1, num_comparisons)
    counts = sorted({num_seeds, 3, 5, 8, 2 * num_seeds, 4 * num_seeds} - {0, 1})
    differences = {
        count: detect(spread, count, alpha, design.power) for count in counts if count >= num_seeds
    }
    return PowerPlan(spread, num_comparisons, differences)


def sum_costs(costs: Sequence[RunCost]) -> RunCost:
    """Return the cost of several runs, one after the other."""
    hours = [cost.hours for cost in costs if cost.hours is not None]
    prices = [cost.usd for cost in costs if cost.usd is not None]
    return RunCost(
        sum(cost.tokens for cost in costs),
        math.fsum(cost.flops for cost in costs),
        math.fsum(hours) if len(hours) == len(costs) else None,
        math.fsum(prices) if len(prices) == len(costs) else None,
    )


def _normalize(value: object) -> str:
    """Return the same text for equal values, such as 1e-3 and 0.001."""
    if value is None:
        return "null"
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value).lower()
