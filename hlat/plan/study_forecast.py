"""Plan of a study, with its text and JSON: `hlat plan +sweep=NAME`.

It has the runs, their cost, and the differences that its seeds can detect.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hlat.config.batch_steps import count_tokens
from hlat.config.compose import compose_points
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.config.seeds import count_seeds
from hlat.config.study import Direction, StudyConfig
from hlat.config.sweep_axes import SweepAxes, load_sweep_axes
from hlat.plan import step_time
from hlat.plan.forecast import compute_run_flops, compute_run_seconds
from hlat.plan.study_power import PowerPlan, count_comparisons, format_required_seeds, plan_power
from hlat.study.earlier_runs import EarlierRuns, get_size, summarize_earlier_runs
from hlat.study.rate_comparison import compares_over_rates
from hlat.tracking.text_format import (
    UNKNOWN,
    format_duration,
    format_setting,
    format_short,
    format_table,
    format_usd,
)

_MAX_AXIS_TEXT = 400
"""Length of the values of an axis above which only the first ones are printed."""


@dataclass(frozen=True)
class RunCost:
    """Cost of a run; hours and price are None if speed or price is unknown."""

    tokens: int
    flops: float
    hours: float | None
    usd: float | None


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


@dataclass(frozen=True)
class StudyForecast:
    """Plan of a study; `power` is None without seeds or without a known spread.

    `earlier` are the runs of the size of the first point. `speeds` are the tokens per second of
    earlier runs of each size; NaN without one.
    """

    sweep: SweepAxes
    design: StudyConfig
    costs: list[RunCost]
    skipped: list[str]
    num_comparisons: int
    earlier: EarlierRuns
    speeds: list[float]
    power: PowerPlan | None

    @property
    def total(self) -> RunCost:
        """Cost of all runs, one after the other."""
        return sum_costs(self.costs)

    @property
    def num_seeds(self) -> int:
        """Number of seeds of each point."""
        return count_seeds(self.sweep.axes)

    @property
    def budget_problems(self) -> list[str]:
        """Reasons why the study exceeds its budget."""
        limits = {"budget_hours": self.total.hours, "budget_usd": self.total.usd}
        return [
            f"study.{key}={limit:g}: the runs need {value:.3g}"
            for key, value in limits.items()
            if value is not None and (limit := getattr(self.design, key)) is not None
            if value > limit
        ]


def forecast_study(overrides: Sequence[str]) -> StudyForecast:
    """Compose all points of a sweep and return its plan.

    Raises:
        ConfigError: A point is invalid, and the sweep does not skip invalid points.
    """
    sweep = load_sweep_axes(overrides)
    points, configs, skipped = _compose_points(sweep)
    design = configs[0].study
    by_size = {get_size(config): config for config in configs}
    runs = {size: summarize_earlier_runs(each, design.metric) for size, each in by_size.items()}
    earlier = runs[get_size(configs[0])]
    costs = [
        compute_run_cost(config, runs[get_size(config)].tokens_per_second) for config in configs
    ]
    if sweep.num_trials is not None:
        costs *= sweep.num_trials
    num_comparisons = count_comparisons(points, configs)
    num_seeds = count_seeds(sweep.axes)
    spread = design.spread if math.isnan(earlier.spread) else earlier.spread
    power = None
    if num_seeds > 1 and num_comparisons and spread is not None and spread > 0:
        hours = sum_costs(costs).hours
        power = plan_power(design, spread, num_seeds, num_comparisons, hours)
    speeds = [each.tokens_per_second for each in runs.values()]
    return StudyForecast(sweep, design, costs, skipped, num_comparisons, earlier, speeds, power)


def format_forecast(forecast: StudyForecast) -> list[str]:
    """Return the text of a plan."""
    design, total = forecast.design, forecast.total
    lines = [f"question: {design.question}", ""] if design.question else []
    lines += [_format_headline(forecast)]
    lines += [f"  {_format_axis(key, forecast)}" for key in forecast.sweep.axes]
    lines += [f"  skipped: {line}" for line in forecast.skipped]
    better = "higher" if design.direction is Direction.maximize else "lower"
    lines += [f"metric: {design.metric}, {better} is better", ""]
    lines += format_table(["cost", "per run", "all runs"], _build_cost_rows(forecast.costs, total))
    lines += [_format_speed_source(forecast)]
    lines += [f"exceeds the budget: {problem}" for problem in forecast.budget_problems]
    return [*lines, "", *_format_power(forecast)]


def summarize_forecast(forecast: StudyForecast) -> dict[str, Any]:
    """Return a plan as JSON."""
    return {
        "question": forecast.design.question,
        "metric": forecast.design.metric,
        "axes": forecast.sweep.axes,
        "runs": len(forecast.costs),
        "skipped": forecast.skipped,
        "comparisons": forecast.num_comparisons,
        "total": asdict(forecast.total),
        "earlier_runs": forecast.earlier.num_runs,
        "power": None if forecast.power is None else asdict(forecast.power),
        "exceeds_budget": forecast.budget_problems,
    }


def _compose_points(
    sweep: SweepAxes,
) -> tuple[list[dict[str, str]], list[Config], list[str]]:
    """Return the valid points, their configurations, and the reasons of skipped ones."""
    valid, configs, problems = [], [], []
    points = sweep.list_points()
    words = [[f"{key}={value}" for key, value in point.items()] for point in points]
    composed = compose_points([[*sweep.overrides, *each] for each in words])
    for point, each, config in zip(points, words, composed, strict=True):
        try:
            if isinstance(config, ConfigError):
                raise config
            configs.append(resolve_config(config))
            valid.append(point)
        except ConfigError as error:
            problems += [f"[{' '.join(each)}] {problem}" for problem in error.problems]
    if problems and not (sweep.prune and configs):
        raise ConfigError(*problems)
    return valid, configs, problems


def _format_headline(forecast: StudyForecast) -> str:
    count = len(forecast.costs)
    if forecast.sweep.num_trials is not None:
        return f"{count} runs of a search"
    seeds = forecast.num_seeds
    points = len(forecast.sweep.list_points()) // seeds
    return f"{count} runs: {points} points with {seeds} {'seed' if seeds == 1 else 'seeds'}"


def _format_axis(key: str, forecast: StudyForecast) -> str:
    baseline = forecast.design.baseline.get(key)
    values = forecast.sweep.axes[key]
    text = f"{key}: {', '.join(values)}"
    if len(text) > _MAX_AXIS_TEXT:
        text = f"{key}: {values[0]}, {values[1]}, ... ({len(values)} values)"
    return text if baseline is None else f"{text}; baseline {format_setting(baseline)}"


def _build_cost_rows(costs: Sequence[RunCost], total: RunCost) -> list[list[str]]:
    def format_range(values: Sequence[float | None], format_one: Any) -> str:
        known = sorted(value for value in values if value is not None)
        if not known or len(known) < len(values):
            return UNKNOWN
        low, high = format_one(known[0]), format_one(known[-1])
        return str(low) if low == high else f"{low} to {high}"

    def format_hours(hours: float) -> str:
        return format_duration(3600 * hours)

    return [
        [
            "tokens",
            format_range([c.tokens for c in costs], format_short),
            format_short(total.tokens),
        ],
        ["FLOPs", format_range([c.flops for c in costs], format_flops), format_flops(total.flops)],
        [
            "time",
            format_range([c.hours for c in costs], format_hours),
            UNKNOWN if total.hours is None else format_hours(total.hours),
        ],
        ["price", format_range([c.usd for c in costs], format_usd), format_usd(total.usd)],
    ]


def format_flops(value: float) -> str:
    """Return a number of FLOPs with an exponent."""
    return f"{value:.3g}"


def _format_speed_source(forecast: StudyForecast) -> str:
    known = sorted(speed for speed in forecast.speeds if not math.isnan(speed))
    if len(known) == len(forecast.speeds):
        low, high = format_short(known[0]), format_short(known[-1])
        text = low if low == high else f"{low} to {high}"
        return f"speed: {text} tokens per second, median of earlier runs"
    if forecast.total.hours is None:
        return (
            "speed: unknown; no earlier run of this size, and no constants of this hardware; "
            "train one run and plan again"
        )
    if known:
        num_sizes = len(forecast.speeds)
        return f"speed: of earlier runs for {len(known)} of {num_sizes} sizes, otherwise predicted"
    return "speed: predicted"


def _format_power(forecast: StudyForecast) -> list[str]:
    design, power = forecast.design, forecast.power
    if power is None:
        return [_explain_missing_power(forecast)]
    count = forecast.num_comparisons
    source = (
        "stated in study.spread"
        if math.isnan(forecast.earlier.spread)
        else f"from {forecast.earlier.num_runs} earlier runs of this size"
    )
    smallest = power.differences[forecast.num_seeds]
    lines = [
        f"smallest difference that {forecast.num_seeds} seeds detect with {design.power:.0%} "
        f"power: {smallest:.2g}",
        f"spread of a difference over seeds: {power.spread:.2g}, {source}; alpha {design.alpha:g} "
        f"over {count} {'comparison' if count == 1 else 'comparisons'}",
    ]
    if (wanted := design.smallest_difference) is not None and smallest > wanted:
        lines.append(f"this is more than study.smallest_difference={wanted:g}; add seeds or steps")
    hours = forecast.total.hours
    hours_per_seed = None if hours is None else hours / forecast.num_seeds
    lines += format_required_seeds(design, power, hours_per_seed)
    rows = [[str(seeds), f"{value:.2g}"] for seeds, value in power.differences.items()]
    return [*lines, "", *format_table(["seeds", "smallest difference"], rows)]


def _explain_missing_power(forecast: StudyForecast) -> str:
    grid = forecast.design.lr_grid
    if grid.factor is not None and not compares_over_rates(forecast.design):
        return "result: the best optimizer.lr with its interval; no comparisons"
    if forecast.num_seeds < 2 or forecast.sweep.num_trials is not None:
        return "no test: sweep at least two seeds with run.seed=1,2,3"
    if not forecast.num_comparisons:
        return "no test: no point has a baseline; set study.baseline"
    return (
        "smallest detectable difference: unknown, since run.root has no finished runs of this size "
        "with several seeds; state study.spread, the standard deviation of a difference over seeds"
    )
