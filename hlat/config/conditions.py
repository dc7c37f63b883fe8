"""Conditions on keys in the YAML tables of engine limits and of NxDT's keys."""

import re
from collections.abc import Callable, Mapping
from typing import Any

_REFERENCE = re.compile(r"\$([\w.:]*\w)")


def resolve_references(item: Any, get: Callable[[str], Any]) -> Any:
    """Return the value of the key if `item` is `$KEY`; within other text, insert the values."""
    if not isinstance(item, str):
        return item
    if reference := _REFERENCE.fullmatch(item):
        return get(reference[1])
    return _REFERENCE.sub(lambda found: str(get(found[1])), item)


def are_met(conditions: Mapping[str, Any], get: Callable[[str], Any]) -> bool:
    """Return True if the value of every key meets its condition.

    A condition is the list of possible values, `{not: [...]}`, or `{above: x}`.

    Raises:
        TypeError: A value cannot be compared with x.
    """
    return all(_is_met(get(key), condition, get) for key, condition in conditions.items())


def _is_met(actual: Any, condition: Any, get: Callable[[str], Any]) -> bool:
    if isinstance(condition, list):
        return any(actual == resolve_references(item, get) for item in condition)
    ((operator, operand),) = condition.items()
    if operator == "above":
        return actual is not None and bool(actual > operand)
    return not _is_met(actual, operand, get)
