"""Sections of a configuration as JSON, for a process that must not receive code.

A worker gets its settings through a pipe. What arrives is checked against the schema as a YAML
would be, so nothing but plain data can.
"""

import json
from dataclasses import asdict
from operator import attrgetter
from typing import Any, TypeVar

from omegaconf import OmegaConf

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
        omegaconf.errors.OmegaConfBaseException: A field is unknown or of another type.
    """
    section: _Section = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), fields))  # type: ignore[assignment]
    return section
