"""Arcee: Llama with an ungated feed-forward network with ReLU^2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hlat.config.config_errors import ConfigError
from hlat.model.families.family import Family, HFConfig, Settings, format_key
from hlat.model.families.key_mappings import AttentionBiasKey, build_shape_mappings
from hlat.model.families.rotary_keys import RotaryKeys
from hlat.model.mlp_spec import Activation

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


class UngatedActivationKey:
    """hidden_act: activation function of an ungated feed-forward network."""

    keys = ("hidden_act",)
    names = {"relu2": Activation.relu2, "gelu_pytorch_tanh": Activation.gelu}

    def parse(self, config: HFConfig) -> Settings:
        """Return the activation."""
        name = config.get("hidden_act", "relu2")
        if not isinstance(name, str) or name not in self.names:
            supported = ", ".join(self.names)
            raise ConfigError(f"{format_key(config, 'hidden_act')}; hlat supports only {supported}")
        return {"mlp.activation": self.names[name]}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        is_gelu = model.mlp.activation is Activation.gelu
        return {"hidden_act": "gelu_pytorch_tanh" if is_gelu else "relu2"}


FAMILY = Family(
    name="arcee",
    model_type="arcee",
    architecture="ArceeForCausalLM",
    mappings=(
        *build_shape_mappings(rms_norm_eps=1e-5),
        UngatedActivationKey(),
        AttentionBiasKey(),
        RotaryKeys(),
    ),
    heads_divide_hidden_size=True,
)
