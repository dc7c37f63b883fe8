"""Comparison of several runs: settings that differ, and results.

Differences are computed from the configurations, not from the overrides, so that the runs of a
sweep and runs that were started separately are compared in the same way.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.config.seeds import SEED_KEYS, pop_seeds
from hlat.study.metric_curves import interpolate_tokens
from hlat.study.paired_test import compute_mean_interval
from hlat.study.run_record import RunRecord, get_number, get_numbers, is_run_dir, load_run_record
from hlat.study.summary_tables import get_run_state
from hlat.tracking import finished_runs, sweep_log
from hlat.tracking.heldout_rows import get_loop_row
from hlat.tracking.summary_metrics import compute_summary_metrics
from hlat.tracking.text_format import (
    UNKNOWN,
    format_count,
    format_decimal,
    format_percent,
    format_setting,
)

_IDENTITY_KEYS = ("run.name", "run.root")
"""Keys that differ between any two runs."""
_DESIGN_PREFIX = "study."
"""Prefix of settings without effect on a run."""
_MISSING = object()
"""Value of a setting that a run does not have."""
_RESULT_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "Start step": ("start_step", format_count),
    "Step": ("step", format_count),
    "Final loss": ("final_loss", format_decimal),
    "Best loss": ("best_loss", format_decimal),
    "Held-out bits per byte": ("heldout_bits_per_byte", format_decimal),
    "Spikes": ("spikes", format_count),
    "Tokens/s, median": ("median_tokens_per_second", format_count),
    "MFU, median": ("median_mfu", lambda fraction: format_percent(100 * fraction)),
    "Cost (USD)": ("cost_usd", "{:.2f}".format),
}
"""Summary metric and format of each column."""
_SEED_COLUMNS = {
    "Final loss": ("final_loss", 4),
    "Best loss": ("best_loss", 4),
    "Held-out bits per byte": ("heldout_bits_per_byte", 4),
    "Spikes": ("spikes", 1),
    "Tokens/s": ("median_tokens_per_second", 0),
    "MFU": ("median_mfu", 4),
    "Cost (USD)": ("cost_usd", 2),
}
"""Summary metric and number of decimals of each column."""


def load_run_records(directories: Sequence[Path]) -> list[RunRecord]:
    """Load the runs of run directories, sweep directories and directories that contain runs."""
    return [load_run_record(run_dir) for run_dir in list_run_dirs(directories)]


def list_run_dirs(directories: Sequence[Path]) -> list[Path]:
    """Return run directories, and those in sweep directories and in directories of runs."""
    run_dirs: dict[Path, None] = {}
    for directory in directories:
        candidates = [directory] if is_run_dir(directory) else _list_run_dirs(directory)
        found = [candidate for candidate in candidates if is_run_dir(candidate)]
        if not found:
            raise ConfigError(f"{directory} is not a run directory and contains none")
        run_dirs |= dict.fromkeys(found)
    return [*run_dirs]


@dataclass(frozen=True)
class UntrainedPoints:
    """Points of sweeps without a run.

    Attributes:
        skipped: Overrides and reason of each point that cannot run.
        stopped: Overrides and reason of each point that sequential stopping omitted.
        num_seeds: Seeds that the sweeps list; 0 without a sweep.
    """

    skipped: Sequence[str] = ()
    stopped: Sequence[str] = ()
    num_seeds: int = 0


def load_untrained_points(directories: Sequence[Path]) -> UntrainedPoints:
    """Return the points of sweeps without a run; directories of runs have none."""
    sweep_dirs = [*filter(sweep_log.is_sweep_dir, directories)]
    return UntrainedPoints(
        [line for each in sweep_dirs for line in sweep_log.list_skipped_points(each)],
        [line for each in sweep_dirs for line in sweep_log.list_stopped_points(each)],
        max(map(sweep_log.count_seeds, sweep_dirs), default=0),
    )


def _list_run_dirs(directory: Path) -> list[Path]:
    if sweep_log.is_sweep_dir(directory):
        return sweep_log.list_run_dirs(directory)
    return sorted(directory.glob("*"))


def find_config_differences(records: Iterable[RunRecord]) -> dict[str, list[str]]:
    """Return the config keys that differ between runs, with the value of each run.

    Keys that are determined by the preset of their group, such as precision, are omitted.
    """
    return find_differing_settings([record.flat_config for record in records])


def find_differing_settings(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the keys that differ between settings, as `find_config_differences`."""
    keys = dict.fromkeys(
        key
        for tree in trees
        for key in tree
        if key not in _IDENTITY_KEYS and not key.startswith(_DESIGN_PREFIX)
    )
    columns = {key: [tree.get(key, _MISSING) for tree in trees] for key in keys}
    values = {
        key: [
            format_setting(None if value is _MISSING else value) if tree else UNKNOWN
            for tree, value in zip(trees, column, strict=True)
        ]
        for key, column in columns.items()
        if not _are_equal(column)
    }
    differing = {key: column for key, column in values.items() if len(set(column)) > 1}
    return {
        key: column
        for key, column in differing.items()
        if not _is_implied_by_preset(key, differing)
    }


def _are_equal(values: Sequence[Any]) -> bool:
    """Return True if all values have one type and text, without formatting each of them."""
    first, *others = values
    if isinstance(first, dict | list):
        return len(set(map(repr, values))) == 1
    return all(type(value) is type(first) and value == first for value in others)


def _is_implied_by_preset(key: str, differing: dict[str, list[str]]) -> bool:
    """Return True if runs with the same name of a section of the key have the same value."""
    values, words = differing[key], key.split(".")
    name_keys = (".".join([*words[:depth], "name"]) for depth in range(1, len(words)))
    return any(
        len({*zip(differing[name], values, strict=True)}) == len({*differing[name]})
        for name in name_keys
        if name in differing and name != key
    )


def build_comparison_table(records: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and a row with results and differing settings for each run.

    Results that no run has are omitted.
    """
    axes = find_config_differences(records)
    rows = [
        [record.name, *_format_results(record), *(values[i] for values in axes.values())]
        for i, record in enumerate(records)
    ]
    return _omit_unknown(["Run", "State", *_RESULT_COLUMNS, "Goodput", *axes], rows)


def build_common_table(records: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]] | None:
    """Return the headers, and losses after as many tokens as the shortest run has trained.

    None if all runs have trained the same number of tokens, or if one has trained none.
    """
    tokens = [[get_number(row, "tokens") for row in record.metrics] for record in records]
    ends = [max(filter(math.isfinite, column), default=0.0) for column in tokens]
    common = min(ends, default=0)
    if not common or common == max(ends):
        return None
    rows = []
    for record, end in zip(records, ends, strict=True):
        rows_until = [row for row in record.metrics if get_number(row, "tokens") <= common]
        losses = [get_number(row, "loss") for row in rows_until]
        positions = interpolate_tokens(record, np.array([*record.evaluations], np.float64))
        means = [
            get_number(get_numbers(get_loop_row(row), "bits_per_byte"), "mean")
            for position, row in zip(positions, record.evaluations.values(), strict=True)
            if math.isclose(position, common)
        ]
        loss, heldout = losses[-1] if losses else math.nan, means[-1] if means else math.nan
        rows.append([record.name, format_count(end), format_decimal(loss), format_decimal(heldout)])
    at = f"at {format_count(common)} tokens"
    headers = ["Run", "Tokens trained", f"Loss {at}", f"Held-out bits per byte {at}"]
    return _omit_unknown(headers, rows)


def drop_copies(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs without copies of others among them."""
    provenances = [record.provenance for record in records]
    return [records[i] for i in finished_runs.find_distinct(provenances)]


def build_seed_table(records: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]] | None:
    """Return the headers, and a row per configuration; None if there is one run of each.

    A cell contains the mean over the finished runs and its 95% confidence interval.
    """
    records = drop_copies(records)
    groups = group_seeds(records)
    if not groups:
        return None
    axes = [key for key in find_config_differences(records) if key not in SEED_KEYS]
    rows = [
        [*point, str(len(runs)), *_format_seed_results([records[i] for i in runs])]
        for point, runs in groups.items()
    ]
    return _omit_unknown([*axes, "Seeds", *_SEED_COLUMNS, "States"], rows)


def _omit_unknown(
    headers: list[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return a table without the columns that have no value."""
    used = [any(row[i] != UNKNOWN for row in rows) for i in range(len(headers))]
    return [*compress(headers, used)], [[*compress(row, used)] for row in rows]


def group_seeds(records: Sequence[RunRecord]) -> dict[tuple[str, ...], list[int]]:
    """Return the indices of the runs by the settings that differ besides the seed.

    The result is empty if no two runs differ in their seed only.
    """
    axes = find_config_differences(records)
    seeds = pop_seeds(axes)
    groups: dict[tuple[str, ...], list[int]] = {}
    for index in range(len(records)):
        groups.setdefault(tuple(values[index] for values in axes.values()), []).append(index)
    return groups if seeds and len(groups) < len(records) else {}


def _format_seed_results(runs: Sequence[RunRecord]) -> list[str]:
    states = [get_run_state(run) for run in runs]
    summaries = [
        compute_summary_metrics(run.metrics, run.events)
        for run, state in zip(runs, states, strict=True)
        if state == "finish"
    ]
    cells = [
        _format_mean_and_interval([one[key] for one in summaries if key in one], decimals)
        for key, decimals in _SEED_COLUMNS.values()
    ]
    counts = (f"{format_count(count)} {state}" for state, count in Counter(states).items())
    return [*cells, ", ".join(counts)]


def _format_mean_and_interval(values: Sequence[float], decimals: int) -> str:
    if not values:
        return UNKNOWN
    mean, low, high = compute_mean_interval(values)
    interval = f" ({low:,.{decimals}f} to {high:,.{decimals}f})" if len(values) > 1 else ""
    return f"{mean:,.{decimals}f}{interval}"


def _format_results(record: RunRecord) -> list[str]:
    summary = compute_summary_metrics(record.metrics, record.events)
    cells = [
        format_cell(summary[key]) if key in summary else UNKNOWN
        for key, format_cell in _RESULT_COLUMNS.values()
    ]
    return [get_run_state(record), *cells, format_percent(100 * record.time_ledger.goodput)]
