"""Mappings between keys of config.json and settings of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlat.config.config_errors import ConfigError
from hlat.model.families.family import HFConfig, Settings, format_key, get_number
from hlat.model.moe_spec import get_expert_size

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig

ROUTER_OUTPUT_KEYS = ("output_router_logits", "router_aux_loss_coef")
"""Keys of the auxiliary loss, which does not change the logits."""


@dataclass(frozen=True)
class ExpertCountKey:
    """num_local_experts or num_experts: number of experts; transformers reads both names.

    `default` is the number if config.json lacks both keys.
    """

    default: int

    keys = ("num_local_experts", "num_experts")

    def parse(self, config: HFConfig) -> Settings:
        """Return the number of experts."""
        found = [key for key in self.keys if config.get(key) is not None]
        values = {key: get_number(config, key, int) for key in found}
        if len({*values.values()}) > 1:
            keys = " and ".join(f"{key}={value}" for key, value in values.items())
            raise ConfigError(f"config.json has {keys}, which differ; remove one of them")
        return {"mlp.moe.num_experts": next(iter(values.values()), self.default)}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return both keys."""
        return dict.fromkeys(self.keys, model.mlp.moe.num_experts)


@dataclass(frozen=True)
class ExpertSizeKey:
    """moe_intermediate_size: width of an expert; intermediate_size is that of dense layers."""

    default: int

    keys = ("moe_intermediate_size",)

    def parse(self, config: HFConfig) -> Settings:
        """Return the width of an expert."""
        found = {"moe_intermediate_size": self.default, **config}
        return {"mlp.moe.intermediate_size": get_number(found, "moe_intermediate_size", int)}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key."""
        return {"moe_intermediate_size": get_expert_size(model)}


class SparseLayerKeys:
    """decoder_sparse_step and mlp_only_layers: layers with experts.

    Layer i has experts if decoder_sparse_step divides i + 1 and mlp_only_layers lacks i.
    """

    keys = ("decoder_sparse_step", "mlp_only_layers")

    def parse(self, config: HFConfig) -> Settings:
        """Return the layers; raise ConfigError if they are no first layers and a step."""
        found = {"decoder_sparse_step": 1, **config}
        every = get_number(found, "decoder_sparse_step", int)
        if every < 1:
            raise ConfigError(f"{format_key(config, 'decoder_sparse_step')}; use 1 or more")
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            raise ConfigError(
                f"{format_key(config, 'mlp_only_layers')}, which is no list of layers"
            )
        replaced = {layer for layer in dense if (layer + 1) % every == 0}
        num_dense_layers = 1 + max(replaced, default=-1)
        if replaced != set(range(every - 1, num_dense_layers, every)):
            raise ConfigError(
                f"{format_key(config, 'mlp_only_layers')}; hlat supports only first layers, such "
                f"as {[*range(num_dense_layers)]}"
            )
        return {"mlp.moe.every": every, "mlp.moe.num_dense_layers": num_dense_layers}

    def build(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys."""
        moe = model.mlp.moe
        dense = [*range(min(moe.num_dense_layers, model.num_layers))]
        return {"decoder_sparse_step": moe.every, "mlp_only_layers": dense}
