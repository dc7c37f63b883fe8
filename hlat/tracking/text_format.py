"""Formatting of numbers, times and tables as text, shared by figures, tables and captions."""

import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from decimal import Decimal
from itertools import zip_longest
from typing import Any

from hlat.config.config_errors import escape_control_characters

UNKNOWN = "n/a"
"""Text for a missing or non-finite number."""

_PROPORTIONS = {
    *("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all", "acc_greedy"),
    *("exact_match", "em", "f1", "mc1", "mc2", "pct_stereotype"),
}
_UNLIMITED = 1 << 20
"""Width of a table that is written to a file or a pipe."""
_MIN_WRAP = 28
"""Width of a column of a table below which its cells are not wrapped."""
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
    """Return the lines of a table for a terminal, with control characters escaped.

    A table that is wider than the terminal, or than COLUMNS, has its cells wrapped between words.
    If this is not enough, the last columns follow below, after the first column.
    """
    headers, *rows = [[escape_control_characters(cell) for cell in row] for row in (headers, *rows)]
    available = shutil.get_terminal_size((_UNLIMITED, 24)).columns
    columns = [*zip(headers, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    words = [max(len(word) for word in [*" ".join(cells).split(), ""]) for cells in columns]
    least = [min(w, max(word, _MIN_WRAP)) for w, word in zip(widths, words, strict=True)]
    lines: list[str] = []
    for block in _split_columns(least, available):
        fitted = _fit_widths([widths[i] for i in block], [least[i] for i in block], available)
        lines += [""] if lines else []
        for row in (headers, *rows):
            lines += _format_row([row[i] for i in block], fitted)
    return lines


def _split_columns(widths: Sequence[int], available: int) -> list[list[int]]:
    """Return the columns of each block of a table; each begins with the first column."""
    blocks: list[list[int]] = [[]]
    for i in range(len(widths)):
        line_width = _get_line_width([widths[k] for k in (*blocks[-1], i)])
        if len(blocks[-1]) > 1 and line_width > available:
            blocks.append([0])
        blocks[-1].append(i)
    return blocks


def _fit_widths(widths: list[int], least: list[int], available: int) -> list[int]:
    """Return the widths, with the widest reduced until a line fits or all are at their least."""
    while _get_line_width(widths) > available and widths != least:
        i = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        widths = [*widths[:i], widths[i] - 1, *widths[i + 1 :]]
    return widths


def _get_line_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _format_row(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row; a cell of several lines begins in the first one."""
    wrapped = [
        [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(cells, widths, strict=True)
    ]
    for parts in zip_longest(*wrapped, fillvalue=""):
        line = "  ".join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True))
        yield line.rstrip()


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


def format_setting(value: Any) -> str:
    """Return the value of a setting as in an override, such as true, 3e-4 or [1,2]."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float) and math.isfinite(value):
        is_small = 0 < abs(value) < 1e-3
        return f"{Decimal(repr(value)):e}" if is_small else repr(value).removesuffix(".0")
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{format_setting(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(format_setting, value))}]"
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
