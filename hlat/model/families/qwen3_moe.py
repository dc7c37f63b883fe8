"""Qwen3-MoE: Qwen3 with experts in all layers or some of them."""

from hlat.model.families.family import Family
from hlat.model.families.key_mappings import (
    ActivationKey,
    AttentionBiasKey,
    OptionalKey,
    build_shape_mappings,
)
from hlat.model.families.layer_keys import WindowKey
from hlat.model.families.moe_keys import (
    ROUTER_OUTPUT_KEYS,
    ExpertCountKey,
    ExpertSizeKey,
    SparseLayerKeys,
)
from hlat.model.families.rotary_keys import RotaryKeys

FAMILY = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    mappings=(
        *build_shape_mappings(num_key_value_heads=4),
        ActivationKey(),
        AttentionBiasKey(),
        RotaryKeys(),
        WindowKey(has_switch=True),
        ExpertCountKey(128),
        OptionalKey("num_experts_per_tok", "mlp.moe.experts_per_token", int, 8),
        ExpertSizeKey(768),
        OptionalKey("norm_topk_prob", "mlp.moe.normalize_top_k", bool, False),
        SparseLayerKeys(),
    ),
    fixed={"attention.qk_norm": True, "mlp.kind": "moe"},
    ignored_keys=(*ROUTER_OUTPUT_KEYS, "max_window_layers"),
)
