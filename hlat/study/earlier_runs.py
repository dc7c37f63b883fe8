"""Earlier runs of the size of a planned run: their spread over seeds and their speed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hlat.config.batch_steps import count_tokens
from hlat.config.lr_grid import LR_KEY
from hlat.config.run import Config
from hlat.config.run_identity import flatten_model
from hlat.config.run_steps import compute_total_steps
from hlat.config.seeds import format_seeds
from hlat.config.study import Direction
from hlat.study.index_file import load_run_list
from hlat.study.power import estimate_difference_std
from hlat.study.rate_comparison import compares_over_rates
from hlat.study.run_row import RunRow, Settings

_IGNORED_GROUPS = ("run", "study", "tracking", "checkpoint", "recovery")
"""Groups of settings that do not distinguish the points of a study."""
_TOKEN_TOLERANCE = 0.01
"""Relative difference of the tokens of runs of one size."""


@dataclass(frozen=True)
class EarlierRuns:
    """Finished runs of one size; NaN for a value that they do not have.

    `tokens_per_second` is that of runs with other numbers of tokens if there are none with these.

    `spread` is the standard deviation over seeds of the difference between two points, from
    `num_runs` runs. In a study that compares settings over learning rates, the points are settings,
    with the best value over the rates.
    """

    spread: float
    num_runs: int
    tokens_per_second: float


def summarize_earlier_runs(config: Config, metric: str) -> EarlierRuns:
    """Return the spread of a metric and the speed of finished runs in the root of a run."""
    root = Path(config.run.root)
    if not root.is_dir():
        return EarlierRuns(math.nan, 0, math.nan)
    runs = load_run_list(root)
    same_model = [
        (row, settings)
        for row, settings in zip(runs.rows, runs.settings, strict=True)
        if _has_model(row, settings, config)
    ]
    similar = [(row, settings) for row, settings in same_model if _has_length(row, config)]
    spread, num_runs = estimate_difference_std(_list_points(similar, config, metric))
    speeds = _list_speeds(similar, config) or _list_speeds(same_model, config)
    return EarlierRuns(spread, num_runs, median(speeds) if speeds else math.nan)


def _list_speeds(runs: Sequence[tuple[RunRow, Settings]], config: Config) -> list[float]:
    """Return the tokens per second of the runs on the hardware of a run."""
    return [
        row["median_tokens_per_second"]
        for row, settings in runs
        if settings.get("hardware.name") == config.hardware.name
        and "median_tokens_per_second" in row
    ]


def _list_points(
    runs: Sequence[tuple[RunRow, Settings]], config: Config, metric: str
) -> list[dict[str, float]]:
    """Return the metric of each point by seed, or the best over the rates of each setting."""
    has_grid = compares_over_rates(config.study)
    points: dict[str, dict[str, dict[str, float]]] = {}
    for row, settings in runs:
        value = row.get(metric)
        if isinstance(value, int | float):
            kept = {k: v for k, v in settings.items() if not (has_grid and k == LR_KEY)}
            by_seed = points.setdefault(_get_point(row, kept), {})
            rate = str(settings.get(LR_KEY)) if has_grid else ""
            by_seed.setdefault(format_seeds(settings), {}).setdefault(rate, float(value))
    select = max if config.study.direction is Direction.maximize else min
    return [
        {
            seed: select(by_rate.values())
            for seed, by_rate in by_seed.items()
            if len(by_rate) == max(map(len, by_seed.values()))
        }
        for by_seed in points.values()
    ]


def get_size(config: Config) -> tuple[tuple[str, object], ...]:
    """Return tokens and sizes of the model, which are equal in runs of one size."""
    sizes = tuple(
        (key, value) for key, value in flatten_model(config.model).items() if _is_size(key)
    )
    return (("tokens", _count_tokens(config)), *sizes)


def _has_model(row: RunRow, settings: Settings, config: Config) -> bool:
    model = flatten_model(config.model)
    return row["state"] == "finish" and all(
        settings.get(key, value) == value for key, value in model.items() if _is_size(key)
    )


def _has_length(row: RunRow, config: Config) -> bool:
    tokens = _count_tokens(config)
    return bool(abs(row.get("tokens", 0) - tokens) <= _TOKEN_TOLERANCE * tokens)


def _count_tokens(config: Config) -> int:
    return count_tokens(compute_total_steps(config), config.batch)


def _is_size(key: str) -> bool:
    """Return True for a setting of the model that determines its number of parameters."""
    names = ("num_layers", "hidden_size", "intermediate_size", "vocab_size")
    return key.removeprefix("model.") in names


def _get_point(row: RunRow, settings: Settings) -> str:
    """Return the settings of a point and the step of its start.

    The checkpoint itself is omitted, since the trunks of two seeds differ.
    """
    kept = [
        (key, settings[key])
        for key in sorted(settings)
        if key.partition(".")[0] not in _IGNORED_GROUPS
    ]
    return repr([row.get("start_step"), *kept])
