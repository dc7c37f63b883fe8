"""Row of a run in the index: state, results, code, data and settings."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.recorded_config import load_flat_settings
from hlat.study.run_record import RunRecord, load_run_record
from hlat.study.summary_tables import get_run_state
from hlat.tracking.lost_work import END_EVENTS
from hlat.tracking.summary_metrics import compute_summary_metrics
from hlat.tracking.text_format import format_setting, format_value

RunRow = dict[str, Any]
"""Columns of a run by name, without settings."""
Settings = dict[str, Any]
"""Settings of a run by full key."""
CONFIG_PREFIX = "config."
"""Prefix of settings among the columns."""


def build_run_row(run_dir: Path, root: Path) -> tuple[RunRow, Settings]:
    """Return the row and the settings of a run directory; settings are empty if unreadable."""
    record = load_run_record(run_dir)
    try:
        settings = load_flat_settings(record.config)
    except ConfigError:
        settings = {}
    provenance, times = record.provenance, record.get_finite_values("time").tolist()
    times += [row["time"] for row in record.events if isinstance(row.get("time"), int | float)]
    hosts = provenance.get("hosts")
    row: RunRow = {
        "run": run_dir.relative_to(root).as_posix(),
        "state": get_run_state(record),
        "started": record.start_time if math.isfinite(record.start_time) else None,
        "ended": max(times, default=None),
        **compute_summary_metrics(record.metrics, record.events),
        **_get_heldout_sources(record),
        "code": provenance.get("git_revision"),
        "changed_code": _digest(provenance.get("git_diff")),
        "data": _digest(provenance.get("data")),
        "host": hosts[0] if isinstance(hosts, list) and hosts else None,
        "identity": provenance.get("identity"),
        "copy_of": provenance.get("copy_of"),
    }
    return row, settings


def is_ended(row: RunRow) -> bool:
    """Return True if the run has ended, so that its files rarely change."""
    return row.get("state") in END_EVENTS


def get_value(row: RunRow, settings: Settings, column: str) -> Any:
    """Return the value of a column, `config.KEY` for a setting; None if it is missing."""
    if column.startswith(CONFIG_PREFIX):
        return settings.get(column.removeprefix(CONFIG_PREFIX))
    return row.get(column)


def format_column(row: RunRow, settings: Settings, column: str) -> str:
    """Return the value of a column as text; of a setting as in an override."""
    value = get_value(row, settings, column)
    return format_setting(value) if column.startswith(CONFIG_PREFIX) else format_value(value)


def get_value_order(text: str) -> tuple[float, str]:
    """Return a key that sorts numbers by value, before other strings."""
    try:
        number = float(text)
    except ValueError:
        return math.inf, text
    return (math.inf if math.isnan(number) else number), text


def _get_heldout_sources(record: RunRecord) -> RunRow:
    """Return the last held-out bits per byte of each source."""
    last = [*record.evaluations.values()][-1:]
    bits = last[0].get("bits_per_byte") if last else None
    if not isinstance(bits, dict):
        return {}
    return {f"heldout_bits_per_byte.{name}": bits[name] for name in bits if name != "mean"}


def _digest(value: Any) -> str | None:
    """Return eight digits that identify a value; None if there is none."""
    if not value:
        return None
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
