"""Redaction of values from the environment in everything that is printed or recorded.

A configuration may refer to a secret, such as `${oc.env:DB_PASSWORD}`. A resolver records the
values of all such expressions. From then on they are replaced by the expressions in text for the
console, logs, events and tracking services. The values of the configuration itself remain, so a
path with a secret is still a path.
"""

import html
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import quote

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

MIN_LENGTH = 4
"""Minimum length of a redacted value; shorter ones, such as numbers, occur in other text."""
PUBLIC_VARIABLES = {
    *("HOME", "HOSTNAME", "LOGNAME", "PWD", "TMPDIR", "USER"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID", "SLURM_JOB_NAME"),
    "SLURMD_NODENAME",
}
"""Variables whose values are not redacted."""
_ENCODINGS: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: repr(text)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    html.escape,
    quote,
)
"""Forms of a value in messages, JSON, pages and URLs."""
_EXPRESSION = re.compile(r"\$\{\s*oc\.env:\s*(\w+)")
"""Start of an expression, which may have a default value."""
_REDACTED = re.compile(r"\$\{oc\.env:(\w+)\}(/?)")
"""Expression in redacted text, and a separator after it."""


class RecordedValues:
    """Values of variables in this process, and the pattern that finds them."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._expressions: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def add(self, name: str, value: str) -> None:
        """Add the value of a variable."""
        self.names.add(name)
        forms = {form for form in _iterate_forms(value) if len(form) >= MIN_LENGTH}
        if forms <= self._expressions.keys():
            return
        for form in forms:
            self._expressions.setdefault(form, f"${{oc.env:{name}}}")
        longest_first = sorted(self._expressions, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def replace_in(self, text: str) -> str:
        """Return text with all values replaced by their expressions."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._expressions[match[0]], text)


_VALUES = RecordedValues()


class _RedactedStream:
    """Text stream that redacts what is written to another stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write redacted text."""
        return int(self._stream.write(redact_text(text)))

    def writelines(self, lines: Iterable[str]) -> None:
        """Write redacted lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redact_text(text: str) -> str:
    """Return text with recorded values replaced by expressions such as `${oc.env:NAME}`."""
    return _VALUES.replace_in(text)


def redact_data(data: Any) -> Any:
    """Return plain data with recorded values replaced in all strings; keys remain.

    Tuples become lists, as in JSON.
    """
    if isinstance(data, str):
        return redact_text(data)
    if isinstance(data, dict):
        return {key: redact_data(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [redact_data(item) for item in data]
    return data


def expand_text(text: str) -> str:
    """Return a redacted path with the values of variables that are set."""

    def expand(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        return match[0] if value is None else value.rstrip("/") + match[2]

    record_expressions(text)
    return _REDACTED.sub(expand, text)


def uses_other_variables(text: str) -> bool:
    """Return True if redacted text has a variable that no configuration of this process uses."""
    return not {match[1] for match in _REDACTED.finditer(text)} <= _VALUES.names


def list_recorded_variables() -> list[str]:
    """Return the names of the variables with redacted values, for another process."""
    return sorted(_VALUES.names)


def record_variables(names: Iterable[str]) -> None:
    """Redact the values of these variables in this process, also on stdout and stderr."""
    for name in names:
        if name not in PUBLIC_VARIABLES and (value := os.environ.get(name)):
            _VALUES.add(name, value)
            for stream in ("stdout", "stderr"):
                if not isinstance(getattr(sys, stream), _RedactedStream):
                    setattr(sys, stream, _RedactedStream(getattr(sys, stream)))


def record_expressions(config_text: str) -> None:
    """Redact the variables in the text of a configuration or its overrides."""
    record_variables(match[1] for match in _EXPRESSION.finditer(config_text))


def install_resolver() -> None:
    """Replace OmegaConf's resolver `oc.env` by one that records the values it returns."""
    OmegaConf.register_new_resolver("oc.env", _resolve_variable, replace=True)


def _iterate_forms(value: str) -> Iterator[str]:
    """Yield a value, its lines, and the value as a path, in all encodings.

    A separator at the end is omitted: text may contain the path of a file or of the directory.
    """
    value = value.rstrip("/")
    path = value.partition("://")[2] or value
    for part in (value, *value.splitlines(), path, os.path.normpath(path)):
        for encode in _ENCODINGS:
            yield encode(part)


def _resolve_variable(name: str, *default: Any) -> str | None:
    """Return the value of an environment variable, as OmegaConf's `oc.env` does."""
    record_variables([name])
    return oc.env(name, *default)
