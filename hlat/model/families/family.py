"""Model family of Hugging Face transformers: keys of config.json and tensor names, without torch.

Both directions, from_hf and to_hf in torchtitan, read the same mappings.

A family is a list of mappings. Each mapping converts some keys of config.json to settings of
ModelConfig and back. A setting that no mapping writes has the value in `Family.fixed`, or the
default of its component.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hlat.config.config_errors import ConfigError

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig

HFConfig = Mapping[str, Any]
"""Content of config.json."""

Settings = dict[str, Any]
"""Settings of ModelConfig by their path, such as attention.qkv_bias."""


class KeyMapping(Protocol):
    """Conversion between keys of config.json and settings, in both directions."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of config.json that `parse` reads."""
        ...

    def parse(self, config: HFConfig) -> Settings:
        """Return the settings that the keys mean; raise ConfigError if hlat does not support it."""
        ...

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of a model, those of transformers 4 and of transformers 5."""
        ...


@dataclass(frozen=True)
class Family:
    """Architecture of transformers.

    Attributes:
        name: Value of model.family.
        model_type: Value of model_type in config.json.
        architecture: Class of the model in transformers.
        mappings: Conversions of keys and settings.
        fixed: Settings that the architecture implies, by path.
        ignored_keys: Keys of config.json without effect on the computation, in addition to those
            in ignored_keys.py.
        heads_divide_hidden_size: Whether transformers requires that num_attention_heads divides
            hidden_size although head_dim is a key.
        tensor_names: Parts of canonical names and what files of the family have in their place.
    """

    name: str
    model_type: str
    architecture: str
    mappings: tuple[KeyMapping, ...]
    fixed: Settings = field(default_factory=dict)
    ignored_keys: tuple[str, ...] = ()
    heads_divide_hidden_size: bool = False
    tensor_names: tuple[tuple[str, str], ...] = ()

    def format_tensor_name(self, name: str) -> str:
        """Return the name of a canonical parameter in files of the family."""
        for part, replacement in self.tensor_names:
            name = name.replace(part, replacement)
        return name

    @property
    def keys(self) -> set[str]:
        """Keys of config.json that the mappings read."""
        return {key for mapping in self.mappings for key in mapping.keys}


def format_key(config: HFConfig, key: str) -> str:
    """Return the start of an error message about a key of config.json."""
    return f"config.json has {key}={json.dumps(config[key])}"


def get_number(config: HFConfig, key: str, value_type: type, name: str | None = None) -> Any:
    """Return a value of config.json as bool, int or float.

    Args:
        config: Dictionary with the key.
        key: Key with a value other than null.
        value_type: Expected type; an integer is a valid float.
        name: Name of the key in the error message.

    Raises:
        ConfigError: The value has another type.
    """
    value = config[key]
    if value_type is float and type(value) is int:
        return float(value)
    if type(value) is not value_type:
        names = {bool: "true or false", int: "an integer", float: "a number"}
        problem = (
            f"config.json has {name or key}={json.dumps(value)}, which is not {names[value_type]}"
        )
        raise ConfigError(problem)
    return value
