"""Bounds of configuration values, stored as metadata of the schema's fields."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING


@dataclass(frozen=True)
class Bounds:
    """Interval of valid values."""

    min: float | None = None
    """Inclusive lower bound."""
    max: float | None = None
    """Inclusive upper bound."""
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""

    def __contains__(self, value: float) -> bool:
        """Return True if `value` is in the interval; NaN never is."""
        return not math.isnan(value) and (
            (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """Return the interval in mathematical notation, such as "[0, 1)"."""
        lower = f"({self.above:g}" if self.above is not None else f"[{self.min:g}"
        upper = f"{self.max:g}]" if self.max is not None else f"{self.below or math.inf:g})"
        return f"{lower}, {upper}"

    def format_violation(self) -> str:
        """Return the end of the message "<key>=<value> is ..." for a value outside the bounds."""
        if self.max is None and self.below is None and self.min is not None:
            return f"too small; use {self.min:g} or more"
        return f"outside {self}"


def bounded(default: Any = MISSING, **bounds: float) -> Any:
    """Return a dataclass field with bounds on its values, or on the items of a collection."""
    metadata = {"bounds": Bounds(**bounds)}
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def find_bounds_violations(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield an error message for every value of a dataclass that is outside its field's bounds.

    Args:
        section: Dataclass instance; nested dataclasses, lists and dictionaries are searched too.
        prefix: Start of every key in the messages, such as "hydra.launcher.".
    """
    for item in fields(section):
        bounds = item.metadata.get("bounds")
        for key, value in _iterate_values(f"{prefix}{item.name}", getattr(section, item.name)):
            if is_dataclass(value):
                yield from find_bounds_violations(value, f"{key}.")
            elif bounds is not None and value is not None and value not in bounds:
                yield f"{key}={value} is {bounds.format_violation()}"


def _iterate_values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{key}.{name}", item) for name, item in items)
    else:
        yield key, value
