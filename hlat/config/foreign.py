"""Files of other programs as plain data: a stranger's YAML or JSON is read, never resolved.

Parsers raise whatever hostile text brings them to, so all of it becomes one sentence here.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hlat.config.errors import ConfigError

_LARGEST = 2**18
"""Bytes; configurations have a few thousand."""
_ALIAS = re.compile(r"(?<![^\s\[{,:?])\*[^\s\[\]{},]")
"""Where YAML may repeat a part; aliases within aliases would fill the memory."""


def read_yaml(file: Path) -> Any:
    """Return what a YAML file holds, `${...}` as it was written.

    Raises:
        ConfigError: It is not there or cannot be read.
    """
    return _read(file, _yaml)


def read_json(file: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        ConfigError: It is not there or cannot be read.
    """
    return _read(file, json.loads)


def shown(value: Any, longest: int = 60) -> str:
    """Return a value for the eye, whatever it holds: one line that prints, and not a long one."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = str(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number that is too long"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _yaml(text: str) -> Any:
    if _ALIAS.search(text):
        raise ConfigError("it repeats parts through aliases (*name), which have to be written out")
    return OmegaConf.to_container(OmegaConf.create(text))


def _read(file: Path, parse: Callable[[str], Any]) -> Any:
    try:
        if not file.is_file():
            raise ConfigError("it is not there, or no file")
        if file.stat().st_size > _LARGEST:
            raise ConfigError("it is too large for a configuration")
        return parse(file.read_text(encoding="utf-8"))
    except Exception as error:  # those of the parser and of its types, of the disk, of deep nesting
        raise ConfigError(f"{shown(file, 200)} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """One line, with the line of a YAML that it is about."""
    mark = getattr(error, "problem_mark", None)
    place = "" if mark is None else f"line {mark.line + 1}: "
    problem = getattr(error, "problem", None) or getattr(error, "strerror", None)
    return place + shown(problem or (str(error).splitlines() or [repr(error)])[0], 160)
