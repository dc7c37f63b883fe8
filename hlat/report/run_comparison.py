"""Comparison of several runs: settings that differ, and results.

Differences are computed from the configurations, not from the overrides, so that the runs of a
sweep and runs that were started separately are compared in the same way.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.redacted_config import redact
from hlat.report.figures import METRIC_PANELS, Panel, has_values
from hlat.report.html_page import PageFigure, render_page
from hlat.report.metric_curves import Curve, build_heldout_curves, build_metric_curve
from hlat.report.run_record import RunRecord, is_run_dir, load_run_record
from hlat.report.summary_tables import get_run_state
from hlat.report.text_format import (
    UNKNOWN,
    format_count,
    format_decimal,
    format_percent,
    format_value,
)
from hlat.tracking import sweep_log
from hlat.tracking.summary_metrics import compute_summary_metrics

_IDENTITY_KEYS = ("run.name", "run.root")
"""Keys that differ between any two runs."""
_RESULT_COLUMNS = (
    *("Step", "Final loss", "Best loss", "Held-out bits per byte", "Spikes"),
    *("Tokens/s, median", "MFU, median", "Cost (USD)", "Goodput", "State"),
)


def load_run_records(directories: Sequence[Path]) -> list[RunRecord]:
    """Load the runs of run directories, sweep directories and directories that contain runs.

    Raises:
        ConfigError: A directory contains no run.
    """
    run_dirs: dict[Path, None] = {}
    for directory in directories:
        candidates = [directory] if is_run_dir(directory) else _list_run_dirs(directory)
        found = [candidate for candidate in candidates if is_run_dir(candidate)]
        if not found:
            raise ConfigError(f"{directory} is not a run directory and contains none")
        run_dirs |= dict.fromkeys(found)
    return [load_run_record(run_dir) for run_dir in run_dirs]


def list_skipped_points(directories: Sequence[Path]) -> list[str]:
    """Return a line with overrides and reason for each skipped point of sweeps."""
    sweep_dirs = filter(sweep_log.is_sweep_dir, directories)
    return [line for sweep_dir in sweep_dirs for line in sweep_log.list_skipped_points(sweep_dir)]


def _list_run_dirs(directory: Path) -> list[Path]:
    if sweep_log.is_sweep_dir(directory):
        return sweep_log.list_run_dirs(directory)
    return sorted(directory.glob("*"))


def find_config_differences(records: Iterable[RunRecord]) -> dict[str, list[str]]:
    """Return the config keys that differ between runs, with the value of each run.

    Keys that are determined by the preset of their group, such as precision, are omitted.
    """
    trees = [_load_flat_config(record) for record in records]
    keys = dict.fromkeys(key for tree in trees for key in tree if key not in _IDENTITY_KEYS)
    values = {key: [format_value(tree.get(key)) for tree in trees] for key in keys}
    differing = {key: column for key, column in values.items() if len(set(column)) > 1}
    return {
        key: column
        for key, column in differing.items()
        if not _is_implied_by_preset(key, differing)
    }


def _is_implied_by_preset(key: str, differing: dict[str, list[str]]) -> bool:
    """Return True if runs with the same name of the key's group have the same value."""
    names, values = differing.get(f"{key.partition('.')[0]}.name"), differing[key]
    if names is None or names is values:
        return False
    return len({*zip(names, values, strict=True)}) == len({*names})


def build_comparison_table(records: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and a row with differing settings and results for each run."""
    axes = find_config_differences(records)
    rows = [
        [record.name, *(values[i] for values in axes.values()), *_format_results(record)]
        for i, record in enumerate(records)
    ]
    return ["Run", *axes, *_RESULT_COLUMNS], rows


def build_comparison_panels(records: Sequence[RunRecord]) -> list[Panel]:
    """Return the panels with curves of all runs that have values."""

    def build_panel(key: str, title: str, unit: str) -> Panel:
        curves = [_relabel_curve(build_metric_curve(record, key), record) for record in records]
        return Panel(key, title, unit, curves, can_smooth=key == "loss")

    loss, *others = [build_panel(*panel) for panel in METRIC_PANELS]
    means = [
        _relabel_curve(curve, record)
        for record in records
        for curve in build_heldout_curves(record)[-1:]
    ]
    heldout = Panel("heldout", "Held-out text, mean", "bits per byte", means)
    throughput = build_panel("tokens_per_second", "Throughput", "tokens per second")
    panels = [loss, heldout, *others, throughput]
    return [panel for panel in panels if any(map(has_values, panel.curves))]


def render_comparison_page(
    records: Sequence[RunRecord],
    figures: Sequence[PageFigure],
    seed_table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None,
    skipped_points: Sequence[str] = (),
) -> str:
    """Return the comparison as an HTML document.

    Args:
        records: Runs.
        figures: Figures of the runs.
        seed_table: Headers and rows of `seed_statistics.build_seed_table`.
        skipped_points: Points of their sweep that cannot run.
    """
    headers, rows = build_comparison_table(records)
    seed_headers, seed_rows = seed_table or ([], [])
    return render_page(
        "comparison.html.j2",
        "Comparison",
        f"{len(records)} runs",
        columns=_build_columns(headers),
        rows=rows,
        seed_columns=_build_columns(seed_headers),
        seed_rows=seed_rows,
        skipped_points=skipped_points,
        figures=figures,
    )


def _build_columns(headers: Sequence[str]) -> list[tuple[str, str]]:
    return [(header, "number" if i else "row name") for i, header in enumerate(headers)]


def _format_results(record: RunRecord) -> list[str]:
    summary = compute_summary_metrics(record.metrics, record.events)

    def get(key: str) -> float:
        return summary.get(key, float("nan"))

    return [
        format_count(get("step")),
        format_decimal(get("final_loss")),
        format_decimal(get("best_loss")),
        format_decimal(get("heldout_bits_per_byte")),
        format_count(get("spikes")),
        format_count(get("median_tokens_per_second")),
        format_percent(100 * get("median_mfu")),
        f"{summary['cost_usd']:.2f}" if "cost_usd" in summary else UNKNOWN,
        format_percent(100 * record.time_ledger.goodput),
        get_run_state(record),
    ]


def _relabel_curve(curve: Curve, record: RunRecord) -> Curve:
    return replace(curve, label=record.name)


def _load_flat_config(record: RunRecord) -> dict[str, Any]:
    """Return the settings of a run by full key; empty if its configuration is invalid."""
    with suppress(ConfigError):
        return _flatten(redact(record.config))
    return {}


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        leaves |= _flatten(item, f"{prefix}.{key}".lstrip("."))
    return leaves
