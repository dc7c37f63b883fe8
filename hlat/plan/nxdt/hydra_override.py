"""Values in the grammar of Hydra's overrides."""

import re
from typing import Any

_UNQUOTED = re.compile(r"(?:--)?[\w/][\w./-]*", re.ASCII)
_HYDRA_KEYWORDS = {"true", "false", "null"}


def format_override_value(value: Any) -> str:
    """Return a value as Hydra parses it.

    Raises:
        TypeError: If no key of hlat has the type.
        ValueError: If a string is not printable or contains an interpolation.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(map(format_override_value, value))}]"
    if isinstance(value, str):
        return _format_string(value)
    raise TypeError(f"{type(value).__name__} is not a type of a configuration value")


def _format_string(text: str) -> str:
    """Return a string, in quotes if Hydra would parse it as another type."""
    if not text.isprintable() or "${" in text:
        raise ValueError(f"{text!r} is not printable or contains an interpolation")
    if _UNQUOTED.fullmatch(text) and text.lower() not in _HYDRA_KEYWORDS and not _is_number(text):
        return text
    escaped = re.sub(r'(\\*)("|$)', lambda end: end[1] * 2 + ('\\"' if end[2] else ""), text)
    return f'"{escaped}"'


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
