"""Comparison of the values of one setting over all runs: `hlat runs compare=optimizer.beta2`.

Runs with the same other settings are points of a study. The statistics are those of `hlat report`.
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError
from hlat.config.seeds import SEED_KEYS, pop_seeds
from hlat.config.study import Direction, StudyConfig
from hlat.study.heldout_clusters import HELDOUT_METRIC, compute_influences, find_text_problem
from hlat.study.index_file import RunList
from hlat.study.paired_test import PointRuns
from hlat.study.run_comparison import find_differing_settings
from hlat.study.run_record import load_run_record
from hlat.study.run_row import RunRow, get_value_order
from hlat.study.study_analysis import Point, analyze_study
from hlat.study.study_points import StudyPoint, find_unused_seed
from hlat.study.study_result import StudyResult
from hlat.tracking.text_format import format_setting

_DEFAULT_METRIC = "final_loss"
"""Metric if no run has the metric of its study."""


def compare_factor(runs: RunList, key: str) -> StudyResult:
    """Return the comparisons of the values of a setting with the baseline of its study.

    Without one, the smallest value is the baseline.

    Raises:
        ConfigError: No two runs differ in the setting only; their seeds may differ.
    """
    runs = runs.drop_copies()
    axes = find_differing_settings(runs.settings)
    axes = {name: values for name, values in axes.items() if not name.startswith("tracking.")}
    seeds = pop_seeds(axes) or [""] * len(runs.rows)
    if key in SEED_KEYS:
        raise ConfigError(f"compare={key}: runs are paired by seed; give another setting")
    if key not in axes:
        values = sorted({format_setting(settings.get(key)) for settings in runs.settings})
        if len(values) > 1:
            preset = f"{key.partition('.')[0]}.name"
            raise ConfigError(f"compare={key}: {preset} determines the value; compare {preset}")
        raise ConfigError(f"compare={key}: all runs have the value {', '.join(values) or 'n/a'}")
    factor = axes.pop(key)
    design = _find_design(runs, key)
    if design.baseline.get(key) not in factor:
        design = replace(design, baseline={})
    members: dict[Point, dict[str, RunRow]] = {}
    for i in sorted(range(len(runs.rows)), key=lambda i: get_value_order(factor[i])):
        others = [(name, values[i]) for name, values in axes.items()]
        rows = members.setdefault((*others, (key, factor[i])), {})
        rows[find_unused_seed(seeds[i], rows)] = runs.rows[i]
    influences, text_problem = _load_influences(runs, design.metric)
    points = {p: _build_point(rows, design.metric, influences) for p, rows in members.items()}
    comparisons = analyze_study({point: one.runs for point, one in points.items()}, design)
    if not comparisons:
        raise ConfigError(
            f"compare={key}: no runs differ in it and are otherwise equal; they also differ in "
            f"{', '.join(axes)}"
        )
    return StudyResult(design, points, comparisons, text_problem=text_problem)


def _load_influences(runs: RunList, metric: str) -> tuple[dict[str, NDArray[np.float64]], str]:
    """Return the influences of documents by run, and a problem if the evaluated texts differ.

    The index does not contain them. Without a problem, the second value is empty.
    """
    if metric.partition(".")[0] != HELDOUT_METRIC:
        return {}, ""
    records = [load_run_record(runs.root / row["run"]) for row in runs.rows]
    influences = zip(runs.rows, compute_influences(records, metric), strict=True)
    by_run = {row["run"]: each for row, each in influences if each is not None}
    return by_run, find_text_problem(records, metric)


def _find_design(runs: RunList, key: str) -> StudyConfig:
    """Return the metric, the baseline and the stopping that most runs record."""
    names = ("metric", "direction", "stop_worse", f"baseline.{key}")
    recorded = Counter(
        tuple(settings.get(f"study.{name}") for name in names) for settings in runs.settings
    )
    metric, direction, stop_worse, value = recorded.most_common(1)[0][0]
    baseline = {} if value is None else {key: format_setting(value)}
    design = StudyConfig(baseline=baseline, stop_worse=stop_worse is True)
    metric = str(metric or design.metric)
    if all(row.get(metric) is None for row in runs.rows):
        return replace(design, metric=_DEFAULT_METRIC)
    is_maximized = direction == Direction.maximize.value
    direction = Direction.maximize if is_maximized else Direction.minimize
    return replace(design, metric=metric, direction=direction)


def _build_point(
    rows: dict[str, RunRow], metric: str, influences: dict[str, NDArray[np.float64]]
) -> StudyPoint:
    values = {
        seed: float(value)
        for seed, row in rows.items()
        if row["state"] == "finish" and isinstance(value := row.get(metric), int | float)
    }
    diverged = frozenset(seed for seed, row in rows.items() if row["state"] == "diverge")
    by_seed = {s: influences[row["run"]] for s, row in rows.items() if row["run"] in influences}
    names = tuple(row["run"] for row in rows.values())
    return StudyPoint(PointRuns(values, diverged, by_seed), names, math.nan)
