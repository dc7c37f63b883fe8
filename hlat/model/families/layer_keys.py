"""Mappings between keys of config.json and the settings of single layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hlat.config.config_errors import ConfigError
from hlat.model.attention_spec import LayerType, get_layer_type, get_window
from hlat.model.families.family import HFConfig, Settings, get_number
from hlat.model.rope_spec import has_rope

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig

_Item = TypeVar("_Item")

_TYPES = {"full_attention": LayerType.full, "sliding_attention": LayerType.sliding}


def find_pattern(layers: Sequence[_Item]) -> list[_Item]:
    """Return the shortest list that, repeated, gives the values of all layers."""
    for period in range(1, len(layers)):
        if all(value == layers[i % period] for i, value in enumerate(layers)):
            return list(layers[:period])
    return list(layers)


@dataclass(frozen=True)
class WindowKey:
    """sliding_window of all layers (Mistral); null: no sliding layers.

    If `has_switch`, it applies only if use_sliding_window is true.
    """

    default: int | None = 4096
    has_switch: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of config.json."""
        return ("sliding_window", *(("use_sliding_window",) if self.has_switch else ()))

    def parse(self, config: HFConfig) -> Settings:
        """Return the window."""
        found = {"sliding_window": self.default, "use_sliding_window": False, **config}
        window = found["sliding_window"]
        if self.has_switch and not get_number(found, "use_sliding_window", bool):
            window = None
        if window is not None:
            window = get_number(found, "sliding_window", int)
        return {"attention.sliding_window": window, "attention.layer_pattern": []}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the window if all layers are sliding."""
        windows = {get_window(model, layer) for layer in range(model.num_layers)}
        window = windows.pop() if len(windows) == 1 else None
        switch = {"use_sliding_window": window is not None} if self.has_switch else {}
        return {"sliding_window": window, **switch}


@dataclass(frozen=True)
class LayerTypeKeys:
    """layer_types and sliding_window.

    Attributes:
        default_window: sliding_window if config.json lacks it.
        build_default: Function that returns for each layer True if it is sliding, from config.json
            without layer_types and the window.
        further_keys: Keys that `build_default` reads.
        has_switch: Whether sliding_window applies only if use_sliding_window is true.
    """

    default_window: int | None
    build_default: Callable[[HFConfig, int | None], list[bool]]
    further_keys: tuple[str, ...] = ()
    has_switch: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that determine the layers with a window."""
        switch = ("use_sliding_window",) if self.has_switch else ()
        return ("sliding_window", "layer_types", *switch, *self.further_keys)

    def parse(self, config: HFConfig) -> Settings:
        """Return window and pattern of the layers."""
        found = {"sliding_window": self.default_window, "use_sliding_window": False, **config}
        window = found["sliding_window"]
        if window is not None:
            window = get_number(found, "sliding_window", int)
        if self.has_switch and not get_number(found, "use_sliding_window", bool):
            window = None
        types = self._parse_types(config, window)
        if LayerType.sliding not in types:
            return {"attention.sliding_window": None, "attention.layer_pattern": []}
        if window is None:
            switch = " or use_sliding_window=false" if self.has_switch else ""
            raise ConfigError(
                f"config.json has sliding_attention in layer_types, but no sliding_window{switch}"
            )
        is_sliding = set(types) == {LayerType.sliding}
        pattern = [] if is_sliding else find_pattern(types)
        return {"attention.sliding_window": window, "attention.layer_pattern": pattern}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys; a model of transformers without switch requires a window."""
        layers = range(model.num_layers)
        names = {layer_type: name for name, layer_type in _TYPES.items()}
        types = [get_layer_type(model, layer) for layer in layers]
        has_window = any(get_window(model, layer) is not None for layer in layers)
        if not has_window:
            types = [LayerType.full] * model.num_layers
        window = model.attention.sliding_window if has_window or not self.has_switch else None
        if not self.has_switch:
            window = window or self.default_window
        switch = {"use_sliding_window": has_window} if self.has_switch else {}
        return {"sliding_window": window, "layer_types": [names[t] for t in types], **switch}

    def _parse_types(self, config: HFConfig, window: int | None) -> list[LayerType]:
        types = config.get("layer_types")
        if types is None:
            sliding = self.build_default(config, window)
            return [LayerType.sliding if is_sliding else LayerType.full for is_sliding in sliding]
        num_layers = config.get("num_hidden_layers")
        if not isinstance(types, list) or len(types) != num_layers:
            raise ConfigError(
                f"config.json has layer_types={json.dumps(types)}, which is no list of "
                f"num_hidden_layers={num_layers} types"
            )
        if unknown := [name for name in types if name not in [*_TYPES]]:
            raise ConfigError(
                f"config.json has {json.dumps(unknown[0])} in layer_types; hlat supports only "
                f"{', '.join(_TYPES)}"
            )
        return [_TYPES[name] for name in types]


class RotaryLayerKeys:
    """no_rope_layers: 1 for layers with rotary embedding and 0 for layers without (SmolLM3)."""

    keys = ("no_rope_layers", "no_rope_layer_interval")
    """List, and the interval that replaces it."""

    def parse(self, config: HFConfig) -> Settings:
        """Return the pattern of the layers."""
        rotated = list_rotated_layers(config)
        return {"rope.layer_pattern": [] if all(rotated) else find_pattern(rotated)}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the list."""
        layers = range(model.num_layers)
        return {"no_rope_layers": [int(has_rope(model, layer)) for layer in layers]}


def list_rotated_layers(config: HFConfig) -> list[bool]:
    """Return for each layer True if no_rope_layers gives it a rotary embedding."""
    num_layers, layers = config.get("num_hidden_layers", 0), config.get("no_rope_layers")
    if layers is None:
        found = {"no_rope_layer_interval": 4, **config}
        interval = get_number(found, "no_rope_layer_interval", int)
        if interval < 1:
            raise ConfigError(f"config.json has no_rope_layer_interval={interval}; use 1 or more")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if (
        not isinstance(layers, list)
        or len(layers) < num_layers
        or any(value not in (0, 1) for value in layers)
    ):
        raise ConfigError(
            f"config.json has no_rope_layers={json.dumps(layers)}, which is no list of 0 and 1 for "
            f"num_hidden_layers={num_layers}"
        )
    return [bool(value) for value in layers[:num_layers]]
