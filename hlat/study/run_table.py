"""Runs as an Arrow table, as files, and as text: list, groups and differences."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from hlat.study.index_file import RunList, resolve_columns
from hlat.study.paired_test import compute_mean_interval
from hlat.study.run_row import CONFIG_PREFIX, RunRow, format_column, get_value_order
from hlat.tracking.text_format import (
    UNKNOWN,
    format_count,
    format_decimal,
    format_setting,
    format_timestamp,
    format_value,
)

_COLUMNS = {
    "state": format_value,
    "start_step": format_count,
    "step": format_count,
    "final_loss": format_decimal,
    "heldout_bits_per_byte": format_decimal,
    "median_tokens_per_second": format_count,
    "started": format_timestamp,
}
"""Columns of the list with their formats; start_step is omitted if no run has one."""
_GROUP_METRICS = ("final_loss", "heldout_bits_per_byte", "median_tokens_per_second")
_ORIGIN_COLUMNS = ("code", "changed_code", "data", "host", "state", "step")
"""Columns that a comparison of runs has beside the settings."""


def build_run_table(runs: RunList) -> pa.Table:
    """Return all columns, with settings as `config.KEY`; missing values are null.

    A column with values of several types, such as lists and numbers, contains texts.
    """
    keys = dict.fromkeys(key for row in runs.rows for key in row)
    setting_keys = sorted({key for settings in runs.settings for key in settings})
    columns = {key: _build_array([row.get(key) for row in runs.rows]) for key in keys}
    columns |= {
        f"{CONFIG_PREFIX}{key}": _build_array([settings.get(key) for settings in runs.settings])
        for key in setting_keys
    }
    return pa.table(columns)


def export_runs(runs: RunList, file: Path) -> None:
    """Write all columns as CSV or Parquet, depending on the extension."""
    table = build_run_table(runs)
    if file.suffix == ".csv":
        from pyarrow import csv

        texts = [
            pa.array(
                [None if value is None else format_value(value) for value in column.to_pylist()]
            )
            if pa.types.is_nested(column.type) or pa.types.is_null(column.type)
            else column
            for column in table.columns
        ]
        csv.write_csv(pa.table(dict(zip(table.column_names, texts, strict=True))), file)
    else:
        from pyarrow import parquet

        parquet.write_table(table, file)


def format_run_list(runs: RunList, columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of a list with further columns."""
    columns = resolve_columns(runs, columns)
    has_branches = any("start_step" in row for row in runs.rows)
    shown = {key: _COLUMNS[key] for key in _COLUMNS if key != "start_step" or has_branches}
    headers = ["run", *shown, *columns]
    rows = []
    for i, row in enumerate(runs.rows):
        cells = [
            format_cell(row[key]) if row.get(key) is not None else UNKNOWN
            for key, format_cell in shown.items()
        ]
        settings = runs.settings[i] if columns else {}
        cells += [format_column(row, settings, column) for column in columns]
        rows.append([row["run"], *cells])
    return headers, rows


def format_groups(
    runs: RunList, columns: Sequence[str], metrics: Sequence[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of groups: states, and mean and 95% interval of metrics.

    Metrics are those of finished runs; `metrics` are further ones.
    """
    runs = runs.drop_copies()
    columns = resolve_columns(runs, columns)
    metrics = [*_GROUP_METRICS, *resolve_columns(runs, metrics)]
    groups: dict[tuple[str, ...], list[RunRow]] = {}
    for row, settings in zip(runs.rows, runs.settings, strict=True):
        key = tuple(format_column(row, settings, column) for column in columns)
        groups.setdefault(key, []).append(row)
    rows = []
    for key, members in sorted(groups.items(), key=lambda group: [*map(get_value_order, group[0])]):
        counts = Counter(format_value(row["state"]) for row in members)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        finished = [row for row in members if row["state"] == "finish"]
        means = [_format_mean(finished, metric) for metric in metrics]
        rows.append([*key, states, *means])
    return [*columns, "runs", *metrics], rows


def format_differences(runs: RunList) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of what differs between runs: code, data, and settings."""
    rows = []
    for column in _ORIGIN_COLUMNS:
        values = [format_value(row.get(column)) for row in runs.rows]
        if len({*values}) > 1:
            rows.append([column, *values])
    for key in sorted({key for settings in runs.settings for key in settings}):
        values = [format_setting(settings.get(key)) for settings in runs.settings]
        if len({*values}) > 1:
            rows.append([f"{CONFIG_PREFIX}{key}", *values])
    return ["differs", *(row["run"] for row in runs.rows)], rows


def _format_mean(rows: Sequence[RunRow], metric: str) -> str:
    values = [row[metric] for row in rows if isinstance(row.get(metric), int | float)]
    if not values:
        return UNKNOWN
    mean, low, high = compute_mean_interval(values)
    decimals = 0 if abs(mean) >= 1000 else 4
    interval = "" if len(values) < 2 else f" ({low:,.{decimals}f} to {high:,.{decimals}f})"
    return f"{mean:,.{decimals}f}{interval}"


def _build_array(values: list[Any]) -> pa.Array:
    """Return an Arrow array; of texts for mappings and for values of several types."""
    if not any(isinstance(value, dict) for value in values):
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            return pa.array(values)
    return pa.array([None if value is None else format_value(value) for value in values])
