"""Completion of overrides on the command line, from the schema and the files of `conf/`.

Nothing is composed: a completion must answer while the user types.
"""

import dataclasses
import typing
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum

from hlat.config import extensions
from hlat.config.components import (
    SELECTORS,
    extend_schema,
    list_components,
    list_group_choices,
)
from hlat.config.config_errors import ConfigError
from hlat.config.package_dirs import find_package_dir, list_choices
from hlat.config.run import Config


def complete_override(typed: Sequence[str]) -> list[str]:
    """Return the words that complete the last word of a command line.

    Args:
        typed: Words after the command's name. bash passes `model=7` as three words: the key, `=`
            and the value.
    """
    with suppress(ConfigError):  # the command prints it
        extensions.load_from_command_line(" ".join(typed[:-1]).replace(" = ", "=").split())
    if len(typed) > 1 and typed[-2] == "=":
        key, value = typed[-3] if len(typed) > 2 else "", typed[-1]
        return [word for word in _list_values(key) if word.startswith(value)]
    key, equals, value = typed[-1].partition("=")
    if equals:
        return [f"{key}={word}" for word in _list_values(key) if word.startswith(value)]
    return [word for word in _list_keys(key) if word.startswith(key)]


def _list_keys(prefix: str) -> list[str]:
    """Return groups and sections, or the keys of the section that `prefix` names."""
    section, dot, _ = prefix.rpartition(".")
    if dot:
        schema = _find_type(section)
        types = typing.get_type_hints(schema) if dataclasses.is_dataclass(schema) else {}
        ends = {key: "." if dataclasses.is_dataclass(kind) else "=" for key, kind in types.items()}
        return [f"{section}.{key}{end}" for key, end in ends.items()]
    names = sorted(path.name for path in find_package_dir("conf").iterdir() if path.is_dir())
    groups = [f"{name}=" for name in (*filter(list_choices, names), "+sweep")]
    return groups + [f"{field.name}." for field in dataclasses.fields(Config)]


def _list_values(key: str) -> list[str]:
    """Return the choices of a group, or the values of an enum or a boolean key."""
    if key and "." not in key and (choices := list_group_choices(key.removeprefix("+"))):
        return choices
    section, _, name = key.rpartition(".")
    if SELECTORS.get(section) == name:
        return sorted(component.kind for component in list_components(section))
    found = _find_type(key)
    for kind in (found, *typing.get_args(found)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            return [member.name for member in kind]
        if kind is bool:
            return ["true", "false"]
    return []


def _find_type(key: str) -> typing.Any:
    """Return the type of a dotted key of the schema; None: there is no such key."""
    found: typing.Any = extend_schema(Config)
    for name in key.split("."):
        if not dataclasses.is_dataclass(found):
            return None
        found = typing.get_type_hints(found).get(name)
    return found
