"""Sections of a configuration as JSON, for a process that must not receive code.

A worker gets its settings through a pipe. What arrives is checked against the schema as a YAML
would be, so nothing but plain data can.
"""

import json
from dataclasses import asdict
from operator import attrgetter
from typing import Any, TypeVar

from omegaconf import OmegaConf

from hlat.config.errors import ConfigError

_Section = TypeVar("_Section")


def to_json(sections: dict[str, Any]) -> str:
    """Return dataclasses and plain data by name as one line of JSON."""
    plain = {
        name: asdict(value) if hasattr(value, "__dataclass_fields__") else value
        for name, value in sections.items()
    }
    return json.dumps(plain, default=attrgetter("name"))


def from_plain(schema: type[_Section], fields: dict[str, Any]) -> _Section:
    """Return the section whose fields `to_json` wrote.

    Raises:
        ConfigError: A text would be replaced by what it stands for, such as a variable of the
            environment: who wrote it must not learn that.
        omegaconf.errors.OmegaConfBaseException: A field is unknown or of another type.
    """
    if (text := _expression(fields)) is not None:
        raise ConfigError(f"{text!r} is an expression; only a configuration may hold one")
    section: _Section = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), fields))  # type: ignore[assignment]
    return section


def _expression(value: Any) -> str | None:
    """A text in `value` that OmegaConf would evaluate."""
    if isinstance(value, str):
        return value if "${" in value else None
    if isinstance(value, dict):
        value = [*value, *value.values()]
    found = map(_expression, value if isinstance(value, (list, tuple)) else [])
    return next((text for text in found if text is not None), None)
