"""Settings that determine the computation of a model, in a form that can be compared.

Two models with equal values compute the same function of their weights. The values are effective:
a setting that has no effect, such as the factor of a scaling that is not used, is None.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hlat.model.attention_spec import LayerType, get_layer_type, get_window
from hlat.model.moe_spec import get_expert_size, list_sparse_layers
from hlat.model.parametrization_spec import (
    compute_attention_scale,
    compute_depth_ratio,
    compute_output_multiplier,
)
from hlat.model.rope_spec import RopeScaling, get_rotary_dim, has_rope

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig

_TRAINING_SETTINGS = frozenset(
    {
        *("name", "family", "init_std", "scaled_init", "init_from", "init_copies"),
        *("head.z_loss", "mlp.moe.balance_loss", "mlp.moe.z_loss", "mlp.moe.bias_update_rate"),
        *("mlp.moe.balance_scope", "mlp.moe.capacity_factor", "mlp.moe.upcycling_noise"),
    }
)
"""Settings without effect on the logits."""

_SCALING_SETTINGS: dict[RopeScaling, tuple[str, ...]] = {
    RopeScaling.none: (),
    RopeScaling.linear: ("factor",),
    RopeScaling.dynamic: ("factor", "original_max_positions"),
    RopeScaling.llama3: (
        "factor",
        "original_max_positions",
        "low_freq_factor",
        "high_freq_factor",
    ),
    RopeScaling.yarn: (
        "factor",
        "original_max_positions",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
}
"""Settings of rope that apply to a scaling."""


def flatten_settings(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dataclass by path, such as attention.qkv_bias."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten_settings(value, f"{prefix}{item.name}.")
        else:
            flat[f"{prefix}{item.name}"] = value
    return flat


def compute_effective_settings(model: ModelConfig) -> dict[str, Any]:
    """Return every setting that determines the computation, by path."""
    settings = {
        path: value
        for path, value in flatten_settings(model).items()
        if path not in _TRAINING_SETTINGS
    }
    settings["mlp.moe.intermediate_size"] = get_expert_size(model)
    sparse_layers = list_sparse_layers(model)
    settings |= {"mlp.moe.num_dense_layers": sparse_layers, "mlp.moe.every": sparse_layers}
    return (
        settings
        | _compute_attention_settings(model)
        | _compute_rope_settings(model)
        | _compute_factors(model)
    )


def find_differing_settings(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Return the paths of different settings that cause different effective values.

    The order is that of the schema. Settings of extensions that one of the models lacks are not
    compared: the kinds of components differ if they have an effect.
    """
    values, others = compute_effective_settings(model), compute_effective_settings(other)
    return [
        path
        for path, value in values.items()
        if path in others
        and not _is_equal(value, others[path])
        and format_setting(model, path) != format_setting(other, path)
    ]


def format_setting(model: ModelConfig, path: str) -> str:
    """Return an override of the command line, such as model.attention.qk_norm=true."""
    return f"model.{path}={format_value(flatten_settings(model)[path])}"


def format_value(value: Any) -> str:
    """Return a value as in an override of the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, Enum):
        return value.name
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _compute_attention_settings(model: ModelConfig) -> dict[str, Any]:
    attention, layers = model.attention, range(model.num_layers)
    windows = [get_window(model, layer) for layer in layers]
    return {
        "attention.head_dim": model.head_dim,
        "attention.scale": attention.scale or model.head_dim**-0.5,
        "attention.qk_norm_scope": attention.qk_norm_scope if attention.qk_norm else None,
        "attention.sliding_window": next((w for w in windows if w is not None), None),
        "attention.layer_pattern": [
            LayerType.full if window is None else LayerType.sliding for window in windows
        ],
    }


def _compute_factors(model: ModelConfig) -> dict[str, Any]:
    """Return the factors of a parametrization, by the size of the base that determines each."""
    unscaled = model.attention.scale or model.head_dim**-0.5
    return {
        "parametrization.name": None,
        "parametrization.base_width": compute_output_multiplier(model),
        "parametrization.base_depth": compute_depth_ratio(model),
        "parametrization.base_head_dim": compute_attention_scale(model) / unscaled,
    }


def _compute_rope_settings(model: ModelConfig) -> dict[str, Any]:
    rope, layers = model.rope, range(model.num_layers)
    used = _SCALING_SETTINGS[rope.scaling]
    settings = {
        f"rope.{name}": getattr(rope, name) if name in used else None
        for names in _SCALING_SETTINGS.values()
        for name in names
    }
    if "attention_factor" in used and rope.attention_factor is None:
        settings["rope.attention_factor"] = 0.1 * math.log(rope.factor) + 1
    has_sliding = any(get_layer_type(model, layer) is LayerType.sliding for layer in layers)
    is_unscaled = rope.scaling is RopeScaling.none
    is_equal = is_unscaled and rope.sliding_theta == model.rope_theta
    return settings | {
        "rope.sliding_theta": None if is_equal or not has_sliding else rope.sliding_theta,
        "rope.partial_rotary_factor": get_rotary_dim(model),
        "rope.layer_pattern": [has_rope(model, layer) for layer in layers],
    }


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-12)
    return bool(value == other)


_Section = TypeVar("_Section")


def replace_settings(section: _Section, settings: Mapping[str, Any]) -> _Section:
    """Return a copy of a model, or of a section of it, with other values by path."""
    direct = {path: value for path, value in settings.items() if "." not in path}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        name, _, rest = path.partition(".")
        if rest:
            nested.setdefault(name, {})[rest] = value
    sections = {
        name: replace_settings(getattr(section, name), values) for name, values in nested.items()
    }
    changed: Any = section
    return cast(_Section, dataclasses.replace(changed, **direct, **sections))
