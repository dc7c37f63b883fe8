"""Numbers, times and durations as people read them.

Figures, tables and captions must say the same number the same way.
"""

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

UNKNOWN = "n/a"
"""What stands where a number is missing or not finite."""

_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """At most four digits with a suffix: 1.5M, 0.25, 3e-4; `UNKNOWN` for what is no number."""
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


def exact(value: float) -> str:
    """Three decimals, so that the numbers of a column can be compared."""
    return f"{value:.3f}" if math.isfinite(value) else UNKNOWN


def percent(value: float) -> str:
    """A share in percent, with three digits."""
    return f"{value:.3g} %" if math.isfinite(value) else UNKNOWN


def whole(value: float) -> str:
    """All digits of a count, in groups of three."""
    return f"{value:,.0f}" if math.isfinite(value) else UNKNOWN


def moment(seconds: float) -> str:
    """A Unix time in UTC."""
    if not math.isfinite(seconds):
        return UNKNOWN
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """A stretch of time in its two largest units."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines for a terminal."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    ]


def anything(value: Any) -> str:
    """A value of a JSON file in one line."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: UNKNOWN}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return short(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {anything(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(anything, value))
    return str(value)
