"""Mappings between keys of config.json and settings that several families use."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hlat.config.config_errors import ConfigError
from hlat.model.families.family import HFConfig, KeyMapping, Settings, format_key, get_number
from hlat.model.mlp_spec import Activation

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


@dataclass(frozen=True)
class _SettingKey:
    """A key of config.json with the value of a setting."""

    key: str
    setting: str
    value_type: type

    @property
    def keys(self) -> tuple[str, ...]:
        """Key of config.json."""
        return (self.key,)

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        return {self.key: attrgetter(self.setting)(model)}


class RequiredKey(_SettingKey):
    """A key that config.json must contain."""

    def parse(self, config: HFConfig) -> Settings:
        """Return the setting."""
        if config.get(self.key) is None:
            raise ConfigError(f"config.json has no {self.key}")
        return {self.setting: get_number(config, self.key, self.value_type)}


@dataclass(frozen=True)
class OptionalKey(_SettingKey):
    """A key of config.json with the value of a setting, and a default value.

    If `is_nullable`, null is a value of the setting; otherwise it means the default.
    """

    default: Any
    is_nullable: bool = False

    def parse(self, config: HFConfig) -> Settings:
        """Return the setting."""
        if config.get(self.key) is not None:
            return {self.setting: get_number(config, self.key, self.value_type)}
        is_null = self.is_nullable and self.key in config
        return {self.setting: None if is_null else self.default}


@dataclass(frozen=True)
class KeyValueHeadsKey:
    """num_key_value_heads; null means num_attention_heads.

    `default` is the number if config.json lacks the key.
    """

    default: int | None

    keys = ("num_key_value_heads",)

    def parse(self, config: HFConfig) -> Settings:
        """Return the number of key/value heads."""
        found = {"num_key_value_heads": self.default, **config}
        if found["num_key_value_heads"] is None:
            found["num_key_value_heads"] = config.get("num_attention_heads", 0)
        return {"num_key_value_heads": get_number(found, "num_key_value_heads", int)}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        return {"num_key_value_heads": model.num_key_value_heads}


@dataclass(frozen=True)
class HeadDimKey:
    """head_dim; null means hidden_size / num_attention_heads.

    transformers also reads the key in families without this key in their configuration class.
    """

    default: int | None = None

    keys = ("head_dim",)

    def parse(self, config: HFConfig) -> Settings:
        """Return the size of a head, or None if it is the quotient."""
        found = {"head_dim": self.default, **config}
        if found["head_dim"] is None:
            return {"attention.head_dim": None}
        head_dim = get_number(found, "head_dim", int)
        is_quotient = head_dim * config.get("num_attention_heads", 0) == config.get("hidden_size")
        return {"attention.head_dim": None if is_quotient else head_dim}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        return {"head_dim": model.head_dim}


@dataclass(frozen=True)
class ActivationKey:
    """Activation function of a gated feed-forward network."""

    key: str = "hidden_act"
    default: str = "silu"

    @property
    def keys(self) -> tuple[str, ...]:
        """Key of config.json."""
        return (self.key,)

    def parse(self, config: HFConfig) -> Settings:
        """Return the activation."""
        activations = {
            "silu": Activation.swiglu,
            "swish": Activation.swiglu,
            "gelu_pytorch_tanh": Activation.geglu,
        }
        name = config.get(self.key, self.default)
        if not isinstance(name, str) or name not in activations:
            supported = "silu, gelu_pytorch_tanh"
            raise ConfigError(f"{format_key(config, self.key)}; hlat supports only {supported}")
        return {"mlp.activation": activations[name]}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        is_geglu = model.mlp.activation is Activation.geglu
        return {self.key: "gelu_pytorch_tanh" if is_geglu else "silu"}


class AttentionBiasKey:
    """attention_bias: biases of all four projections of attention."""

    keys = ("attention_bias",)

    def parse(self, config: HFConfig) -> Settings:
        """Return the biases."""
        has_bias = get_number({"attention_bias": False, **config}, "attention_bias", bool)
        return {"attention.qkv_bias": has_bias, "attention.output_bias": has_bias}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        return {"attention_bias": model.attention.qkv_bias and model.attention.output_bias}


class QueryScaleKey:
    """query_pre_attn_scalar: the attention scores are divided by its square root (Gemma)."""

    keys = ("query_pre_attn_scalar",)

    def parse(self, config: HFConfig) -> Settings:
        """Return the factor of the attention scores."""
        key = "query_pre_attn_scalar"
        scalar = get_number({key: 256, **config}, key, float)
        if not scalar > 0:
            raise ConfigError(f"{format_key(config, key)}; it must be positive")
        return {"attention.scale": scalar**-0.5}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key, which is an integer."""
        scale = model.attention.scale or model.head_dim**-0.5
        return {"query_pre_attn_scalar": max(1, round(scale**-2))}


def build_shape_mappings(
    *,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    rms_norm_eps: float = 1e-6,
    tied: bool = False,
) -> tuple[KeyMapping, ...]:
    """Return the mappings of sizes; the arguments are the defaults of the configuration class."""
    return (
        RequiredKey("num_hidden_layers", "num_layers", int),
        RequiredKey("hidden_size", "hidden_size", int),
        RequiredKey("intermediate_size", "intermediate_size", int),
        RequiredKey("num_attention_heads", "num_attention_heads", int),
        KeyValueHeadsKey(num_key_value_heads),
        HeadDimKey(head_dim),
        RequiredKey("vocab_size", "vocab_size", int),
        OptionalKey("rms_norm_eps", "rms_norm_eps", float, rms_norm_eps),
        OptionalKey("tie_word_embeddings", "tie_embeddings", bool, tied),
    )
