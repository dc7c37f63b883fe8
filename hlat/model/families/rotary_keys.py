"""Mapping between the keys of rotary embeddings and settings.

transformers 4 reads rope_theta and rope_scaling, transformers 5 reads rope_parameters. Exports have
both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlat.config.config_errors import ConfigError
from hlat.model.families.family import HFConfig, Settings, get_number
from hlat.model.rope_spec import RopeScaling

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig

_FIELDS: dict[str, type] = {
    "factor": float,
    "original_max_position_embeddings": int,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "beta_fast": float,
    "beta_slow": float,
    "attention_factor": float,
    "mscale": float,
    "mscale_all_dim": float,
    "truncate": bool,
}
"""Types of the keys of all scalings."""

_REQUIRED_FIELDS = {
    RopeScaling.none: (),
    RopeScaling.linear: ("factor",),
    RopeScaling.dynamic: ("factor",),
    RopeScaling.llama3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeScaling.yarn: (),
}
_OPTIONAL_FIELDS = {
    RopeScaling.none: (),
    RopeScaling.linear: (),
    RopeScaling.dynamic: ("original_max_position_embeddings",),
    RopeScaling.llama3: ("original_max_position_embeddings",),
    RopeScaling.yarn: (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_GENERAL_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")
"""Keys that every scaling has; transformers ignores `finetuned`."""


@dataclass(frozen=True)
class RotaryKeys:
    """Keys of a family that rotates all layers in the same way.

    `default_theta` is the base if config.json has none.
    """

    default_theta: float = 10000.0

    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    """Keys of transformers 4 and 5."""

    def parse(self, config: HFConfig) -> Settings:
        """Return the settings; rope_scaling and rope_parameters must agree."""
        _validate_partial_rotary(config, "partial_rotary_factor")
        ropes = {
            key: _get_mapping(config, key)
            for key in ("rope_scaling", "rope_parameters")
            if config.get(key)
        }
        theta = _find_theta(
            {"rope_theta": config, **{f"{key}.rope_theta": rope for key, rope in ropes.items()}},
            self.default_theta,
        )
        parsed = {key: _parse_scaling(rope, key, config) for key, rope in ropes.items()}
        values = list(parsed.values()) or [{"rope.scaling": RopeScaling.none}]
        if values[0] != values[-1]:
            problem = " and ".join(f"{key}={json.dumps(dict(ropes[key]))}" for key in ropes)
            raise ConfigError(f"config.json has {problem}, which differ; remove one of them")
        return {"rope_theta": theta, **values[0]}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of both versions."""
        scaling = _build_scaling(model)
        return {
            "rope_theta": model.rope_theta,
            "rope_scaling": scaling if model.rope.scaling is not RopeScaling.none else None,
            "rope_parameters": {**scaling, "rope_theta": model.rope_theta},
            **_build_max_positions(model),
        }


@dataclass(frozen=True)
class LayerTypeRotaryKeys:
    """Keys of a family that rotates sliding layers differently from full layers.

    transformers never scales the rotary embedding of sliding layers.

    Attributes:
        default_theta: Base of full layers if config.json has none.
        default_sliding_theta: Base of sliding layers if config.json has none.
        sliding_key: Key of the base of sliding layers in transformers 4; None: the base of full
            layers applies, and transformers 4 and 5 have different defaults.
    """

    default_theta: float
    default_sliding_theta: float
    sliding_key: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of transformers 4 and 5."""
        optional = (self.sliding_key,) if self.sliding_key else ()
        return (
            *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
            *optional,
        )

    def parse(self, config: HFConfig) -> Settings:
        """Return the settings of full and sliding layers."""
        _validate_partial_rotary(config, "partial_rotary_factor")
        by_type = _get_mapping(config, "rope_parameters")
        if unknown := [key for key in by_type if key not in _LAYER_TYPES]:
            raise ConfigError(
                f"config.json has {unknown[0]} in rope_parameters; hlat supports only "
                f"{', '.join(_LAYER_TYPES)}"
            )
        self._validate_defaults(config)
        full = {
            **_get_mapping(by_type, "full_attention"),
            **_get_mapping(config, "rope_scaling"),
        }
        sliding = _get_mapping(by_type, "sliding_attention")
        parameters = "rope_parameters.{}_attention.rope_theta"
        bases = {"rope_theta": config, parameters.format("full"): full}
        theta = _find_theta(bases, self.default_theta)
        old = {"rope_theta": config.get(self.sliding_key)} if self.sliding_key else {}
        bases = {self.sliding_key or "": old, parameters.format("sliding"): sliding}
        sliding_theta = _find_theta(bases, self.default_sliding_theta)
        settings = _parse_scaling(full, "rope_parameters.full_attention", config)
        key = "rope_parameters.sliding_attention"
        if _parse_scaling(sliding, key, config)["rope.scaling"] is not RopeScaling.none:
            raise ConfigError(
                f"config.json has {key}={json.dumps(dict(sliding))}; hlat supports no scaling of "
                "sliding layers in this family"
            )
        if self.sliding_key is None and sliding_theta != theta:
            raise ConfigError(
                f"config.json has rope_theta={theta} of full and {sliding_theta} of sliding "
                "layers; hlat supports only equal values in this family"
            )
        if not settings.get("rope.truncate", True):
            raise ConfigError("config.json has truncate=false, which transformers 5 ignores")
        is_equal = sliding_theta == theta and settings["rope.scaling"] is RopeScaling.none
        return {
            "rope_theta": theta,
            "rope.sliding_theta": None if is_equal else sliding_theta,
            **settings,
        }

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of both versions."""
        scaling = _build_scaling(model)
        sliding_theta = model.rope.sliding_theta or model.rope_theta
        return {
            "rope_theta": model.rope_theta,
            **({self.sliding_key: sliding_theta} if self.sliding_key else {}),
            "rope_scaling": scaling if model.rope.scaling is not RopeScaling.none else None,
            "rope_parameters": {
                "full_attention": {**scaling, "rope_theta": model.rope_theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": sliding_theta},
            },
            **_build_max_positions(model),
        }

    def _validate_defaults(self, config: HFConfig) -> None:
        """Raise ConfigError if transformers 4 and 5 read different bases."""
        if self.sliding_key or config.get("rope_parameters"):
            return
        if config.get("rope_theta") != self.default_theta:
            raise ConfigError(
                f"config.json has rope_theta={json.dumps(config.get('rope_theta'))} without "
                "rope_parameters; transformers 4 and 5 use different bases in sliding layers; add "
                'rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": ...}, '
                '"sliding_attention": {...}} to config.json'
            )


def _get_mapping(config: HFConfig, key: str) -> Mapping[str, Any]:
    """Return a dictionary of config.json; a string is a type without parameters."""
    value = config.get(key) or {}
    if isinstance(value, str):
        return {"rope_type": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json has {key}={json.dumps(value)}, which is no JSON object")
    return value


def _find_theta(ropes: Mapping[str, Mapping[str, Any]], default: float) -> float:
    """Return the only base of several dictionaries, given by the full key of their base."""
    thetas = {
        key: get_number(rope, "rope_theta", float)
        for key, rope in ropes.items()
        if rope.get("rope_theta") is not None
    }
    if len({*thetas.values()}) > 1:
        values = ", ".join(f"{key}={value}" for key, value in thetas.items())
        raise ConfigError(f"config.json has {values}, which differ; remove one of them")
    return float(next(iter(thetas.values()), default))


def _validate_partial_rotary(config: HFConfig, name: str) -> None:
    factor = config.get("partial_rotary_factor")
    if factor is not None and factor != 1:
        raise ConfigError(
            f"config.json has {name}={json.dumps(factor)}; transformers rotates whole heads in "
            "this family"
        )


def _parse_scaling(rope: Mapping[str, Any], name: str, config: HFConfig) -> Settings:
    """Return the settings of a dictionary with rope_type and parameters."""
    description = f"config.json has {name}={json.dumps(dict(rope))}"
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    types = {"default": RopeScaling.none} | {
        scaling.value: scaling for scaling in RopeScaling if scaling is not RopeScaling.none
    }
    if not isinstance(rope_type, str) or rope_type not in types:
        raise ConfigError(f"{description}; hlat supports only the types {', '.join(types)}")
    scaling = types[rope_type]
    required, optional = _REQUIRED_FIELDS[scaling], _OPTIONAL_FIELDS[scaling]
    known = {*required, *optional, *_GENERAL_FIELDS}
    if unknown := [key for key, value in rope.items() if key not in known and value is not None]:
        raise ConfigError(f"{description}; {unknown[0]} is no key of type {rope_type}")
    if missing := [key for key in required if rope.get(key) is None]:
        raise ConfigError(f"{description} without {missing[0]}")
    _validate_partial_rotary(rope, f"{name}.partial_rotary_factor")
    values = {
        key: get_number(rope, key, _FIELDS[key], f"{name}.{key}")
        for key in (*required, *optional)
        if rope.get(key) is not None
    }
    return {"rope.scaling": scaling, **_convert_scaling(scaling, values, config, description)}


def _convert_scaling(
    scaling: RopeScaling, values: dict[str, Any], config: HFConfig, description: str
) -> Settings:
    """Return the settings of the parameters of a scaling."""
    if scaling is RopeScaling.none:
        return {}
    if scaling is RopeScaling.linear:
        return {"rope.factor": values["factor"]}
    if config.get("max_position_embeddings") is None:
        raise ConfigError("config.json has no max_position_embeddings")
    max_positions = get_number(config, "max_position_embeddings", int)
    original = values.get("original_max_position_embeddings", max_positions)
    if scaling is RopeScaling.dynamic and original != max_positions:
        raise ConfigError(
            f"{description}; transformers ignores original_max_position_embeddings of type dynamic "
            f"and uses max_position_embeddings={max_positions}"
        )
    settings = {"rope.original_max_positions": original}
    if scaling is RopeScaling.yarn:
        return settings | _convert_yarn(values, max_positions / original)
    names = ("factor", "low_freq_factor", "high_freq_factor")
    return settings | {f"rope.{name}": values[name] for name in names if name in values}


def _convert_yarn(values: dict[str, Any], default_factor: float) -> Settings:
    """Return the settings of yarn; its parameters have defaults, also if they are 0."""
    factor = values.get("factor", default_factor)
    mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
    attention_factor = values.get("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        log_factor = 0.1 * math.log(factor) if factor > 1 else 0.0
        attention_factor = (mscale * log_factor + 1) / (mscale_all_dim * log_factor + 1)
    return {
        "rope.factor": factor,
        "rope.beta_fast": values.get("beta_fast") or 32.0,
        "rope.beta_slow": values.get("beta_slow") or 1.0,
        "rope.attention_factor": attention_factor,
        "rope.truncate": values.get("truncate", True),
    }


def _build_scaling(model: ModelConfig) -> dict[str, Any]:
    """Return rope_type and its parameters, without rope_theta."""
    rope, scaling = model.rope, model.rope.scaling
    if scaling is RopeScaling.none:
        return {"rope_type": "default"}
    built: dict[str, Any] = {"rope_type": scaling.value, "factor": rope.factor}
    if scaling in (RopeScaling.llama3, RopeScaling.yarn):
        built["original_max_position_embeddings"] = rope.original_max_positions
    if scaling is RopeScaling.llama3:
        built |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if scaling is RopeScaling.yarn:
        built |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            built["attention_factor"] = rope.attention_factor
        if not rope.truncate:
            built["truncate"] = False
    return built


def _build_max_positions(model: ModelConfig) -> dict[str, Any]:
    """Return max_position_embeddings if transformers computes the scaling from it.

    Type dynamic has no other key for the original positions. transformers 4 divides it by the
    original positions to obtain the factor of yarn.
    """
    rope, original = model.rope, model.rope.original_max_positions
    if original is not None and rope.scaling is RopeScaling.dynamic:
        return {"max_position_embeddings": original}
    if original is not None and rope.scaling is RopeScaling.yarn:
        return {"max_position_embeddings": round(rope.factor * original)}
    return {}
