"""Text of metrics, intervals and p values."""

import math

from hlat.tracking.text_format import UNKNOWN, format_short

_INTERVAL_LIMIT = 1000
"""Values from here on have a suffix."""


def format_metric(value: float, signed: bool = False, decimals: int = 4) -> str:
    """Return a value of a metric or a difference."""
    if not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= _INTERVAL_LIMIT:
        return ("+" if signed and value > 0 else "") + format_short(value)
    return f"{value:+.{decimals}f}" if signed else f"{value:.{decimals}f}"


def format_interval(low: float, high: float) -> str:
    """Return a confidence interval."""
    return UNKNOWN if math.isnan(low) else f"{format_metric(low)} to {format_metric(high)}"


def format_p_value(value: float) -> str:
    """Return a p value with two digits."""
    if math.isnan(value):
        return UNKNOWN
    return "< 0.001" if value < 0.001 else f"{value:.2g}"
