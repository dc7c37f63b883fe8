"""Formatting of numbers, times and tables as text, shared by figures, tables and captions."""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from hlat.config.config_errors import escape_control_characters

UNKNOWN = "n/a"
"""Text for a missing or non-finite number."""

_PROPORTIONS = {
    *("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all", "acc_greedy"),
    *("exact_match", "em", "f1", "mc1", "mc2", "pct_stereotype"),
}
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_short(value: float) -> str:
    """Return a number with at most four digits and a suffix, such as 1.5M, 0.25 or 3e-4."""
    if not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for unit, suffix in _SUFFIXES:
        if size >= unit and size >= 1e4:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def format_decimal(value: float) -> str:
    """Return a number with three decimals, comparable within a column."""
    return f"{value:.3f}" if math.isfinite(value) else UNKNOWN


def format_percent(value: float) -> str:
    """Return a percentage with three digits."""
    return f"{value:.3g} %" if math.isfinite(value) else UNKNOWN


def format_fraction(value: float | None) -> str:
    """Return a fraction of 1 as a percentage with one decimal."""
    return UNKNOWN if value is None else f"{value:.1%}"


def format_usd(amount: float | None) -> str:
    """Return a price; small ones with three digits."""
    if amount is None:
        return UNKNOWN
    return f"${amount:,.3g}" if amount < 1 else f"${amount:,.2f}"


def format_count(value: float | None) -> str:
    """Return an integer with thousands separators."""
    return f"{value:,.0f}" if value is not None and math.isfinite(value) else UNKNOWN


def format_timestamp(seconds: float) -> str:
    """Return a Unix time in UTC."""
    try:
        time = datetime.fromtimestamp(seconds, tz=timezone.utc)
    except (OSError, OverflowError, ValueError):  # not finite, or not a year of 1 to 9999
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S")


def format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for a terminal, with control characters escaped."""
    headers, *rows = [[escape_control_characters(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headers, *rows)
    ]


def format_value(value: Any) -> str:
    """Return a value of a JSON file in one line."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: UNKNOWN}[value]
    if isinstance(value, float):
        return format_short(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_value(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    return str(value)


def is_proportion(metric: str) -> bool:
    """Return True if a metric of a benchmark task, as `metric,filter`, is a proportion."""
    name = metric.partition(",")[0]
    return name in _PROPORTIONS or name.startswith("pass@")


def format_markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return [f"| {' | '.join(map(_escape_markdown, line))} |" for line in lines]


def _escape_markdown(text: str) -> str:
    """Return a text for a cell of a Markdown table."""
    return escape_control_characters(text).replace("\\", "\\\\").replace("|", "\\|")


def format_gib(num_bytes: float) -> str:
    """Return a size in GiB."""
    return f"{num_bytes / 2**30:,.2f}"
