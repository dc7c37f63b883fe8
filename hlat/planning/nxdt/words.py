"""Values as the words of a command line: first in Hydra's grammar, then in a shell's."""

import re
from typing import Any

_PLAIN = re.compile(r"(?:--)?[\w/][\w./-]*", re.ASCII)
_READ_OTHERWISE = {"true", "false", "null"}


def written(value: Any) -> str:
    """Return a value as Hydra's grammar of overrides reads it back.

    Raises:
        TypeError: It is of a type that no key of hlat has.
        ValueError: It is a text that does not print, or one that would be replaced.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, str):
        return _text(value)
    raise TypeError(f"{type(value).__name__} is no value of a key")


def _text(text: str) -> str:
    """A text that is not read as a number, a list or a choice; quotes in it stay quotes."""
    if not text.isprintable() or "${" in text:
        raise ValueError(f"{text!r} cannot be written")
    if _PLAIN.fullmatch(text) and text.lower() not in _READ_OTHERWISE and not _number(text):
        return text
    escaped = re.sub(r'(\\*)("|$)', lambda end: end[1] * 2 + ('\\"' if end[2] else ""), text)
    return f'"{escaped}"'


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
