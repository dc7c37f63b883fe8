"""Validation of rows of metrics.jsonl and events.jsonl, which may come from others.

Rows with other types in the fields that hlat computes with are damaged.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

Row = dict[str, Any]
_MAX_INTEGER = 2**63 - 1


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Return True for a finite int or float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def get_mean(row: Row, key: str) -> float | None:
    """Return the mean of a metric by source of an `evaluate` event; None if it is not finite."""
    values = row.get(key)
    mean = values.get("mean") if isinstance(values, dict) else None
    return float(mean) if is_finite_number(mean) else None


def is_metrics_row(value: Any) -> TypeGuard[Row]:
    """Return True for a row of metrics.jsonl."""
    required = ("step", "time")
    return isinstance(value, dict) and _has_valid_fields(value, required, _METRICS_FIELDS)


def is_event_row(value: Any) -> TypeGuard[Row]:
    """Return True for a row of events.jsonl; other programs write rows without `attempt`."""
    required = ("event", "step", "time")
    return isinstance(value, dict) and _has_valid_fields(value, required, _EVENT_FIELDS)


def has_valid_event_fields(value: Row) -> bool:
    """Return True for a row with `event` and `step`, without other fields that are damaged."""
    return _has_valid_fields(value, ("event", "step"), _EVENT_FIELDS)


def _has_valid_fields(row: Row, required: Any, checks: Mapping[str, Callable[[Any], bool]]) -> bool:
    has_required = all(key in row for key in required)
    return has_required and all(check(row[key]) for key, check in checks.items() if key in row)


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MAX_INTEGER


def _are_data_stages(value: Any) -> bool:
    """Return True for the phases of a `ledger` event with their sources."""
    return isinstance(value, list) and all(
        isinstance(stage, dict)
        and isinstance(stage.get("name"), str)
        and isinstance(stage.get("sources"), dict)
        and all(isinstance(entry, dict) for entry in stage["sources"].values())
        for stage in value
    )


def _are_samples(value: Any) -> bool:
    """Return True for the texts of a `samples` event."""
    return isinstance(value, list) and all(
        isinstance(sample, dict)
        and isinstance(sample.get("prompt"), str)
        and isinstance(sample.get("text"), str)
        for sample in value
    )


def _is_lost_work(value: Any) -> bool:
    """Return True for the lost work by attempt of `lost_work.compute_lost_work`."""
    return isinstance(value, dict) and all(
        attempt.isascii()
        and attempt.isdigit()
        and len(attempt) < 19
        and isinstance(lost, dict)
        and is_finite_number(lost.get("seconds"))
        and ("until" not in lost or is_finite_number(lost["until"]))
        and ("until" not in lost or _is_integer(lost.get("last_step")))
        for attempt, lost in value.items()
    )


_METRICS_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "step": _is_integer,
    "time": is_finite_number,
    "attempt": _is_integer,
    "step_seconds": is_finite_number,
}
_EVENT_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "event": lambda value: isinstance(value, str),
    "step": _is_integer,
    "time": is_finite_number,
    "attempt": _is_integer,
    "began": lambda value: value is None or is_finite_number(value),
    "stages": _are_data_stages,
    "texts": _are_samples,
    "lost_by_attempt": _is_lost_work,
}
