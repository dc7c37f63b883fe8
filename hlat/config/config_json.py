"""Sections of a configuration as JSON, for processes that must not unpickle objects."""

import json
import re
from dataclasses import asdict
from operator import attrgetter
from typing import Any, TypeVar

from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError

_Section = TypeVar("_Section")


def serialize_sections(sections: dict[str, Any]) -> str:
    """Return dataclasses and plain data by name as one line of JSON."""
    plain = {
        name: asdict(value) if hasattr(value, "__dataclass_fields__") else value
        for name, value in sections.items()
    }
    return json.dumps(plain, default=attrgetter("name"))


def parse_section(schema: type[_Section], fields: dict[str, Any]) -> _Section:
    """Return a section from its fields in JSON, validated against the schema.

    Raises:
        ConfigError: A string contains an interpolation, which could reveal the value of an
            environment variable to the author of the JSON.
        omegaconf.errors.OmegaConfBaseException: A field is unknown or of another type.
    """
    if interpolation := re.search(r"\$\{[^}\"]*", json.dumps(fields)):
        raise ConfigError(
            f"{interpolation[0]}}} is an interpolation, which only a configuration may contain"
        )
    section: _Section = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), fields))  # type: ignore[assignment]
    return section
