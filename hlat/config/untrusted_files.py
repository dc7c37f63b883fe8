"""Loading of untrusted YAML and JSON files as plain data, without resolving interpolations."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.config.redaction import redact_text

_MAX_BYTES = 2**18
"""Limit of the file size; configurations have a few thousand bytes."""
_YAML_ALIAS = re.compile(r"(?<![^\s\[{,:?])\*[^\s\[\]{},]")
"""Aliases in YAML; nested aliases expand exponentially and can exhaust the memory."""


def load_untrusted_yaml(file: Path) -> Any:
    """Return the content of a YAML file, with `${...}` unresolved.

    Raises:
        ConfigError: The file does not exist or cannot be read.
    """
    return _load_file(file, _parse_yaml)


def load_untrusted_json(file: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ConfigError: The file does not exist or cannot be read.
    """
    return _load_file(file, json.loads)


def format_value(value: Any, max_length: int = 60) -> str:
    """Return any value as one line of printable text of limited length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = redact_text(str(value))
    except ValueError:  # Python limits the conversion to a few thousand digits
        return "a number that is too long"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def _parse_yaml(text: str) -> Any:
    if _YAML_ALIAS.search(text):
        raise ConfigError("it contains aliases (*name); replace each by its value")
    return OmegaConf.to_container(OmegaConf.create(text))


def _load_file(file: Path, parse: Callable[[str], Any]) -> Any:
    try:
        if not file.is_file():
            raise ConfigError("it does not exist, or is not a file")
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError("it is too large for a configuration")
        return parse(file.read_text(encoding="utf-8"))
    except Exception as error:  # of the parser, its types, the disk, or the recursion limit
        message = f"{format_value(file, 200)} cannot be read: {_format_error(error)}"
        raise ConfigError(message) from error


def _format_error(error: Exception) -> str:
    """Return one line, with the line number of a YAML error."""
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f"line {mark.line + 1}: "
    problem = getattr(error, "problem", None) or getattr(error, "strerror", None)
    return line + format_value(problem or (str(error).splitlines() or [repr(error)])[0], 160)
