"""OLMoE: QK-norm over the projections, and experts in all layers."""

from hlat.model.attention_spec import QKNormScope
from hlat.model.families.family import Family
from hlat.model.families.key_mappings import (
    ActivationKey,
    AttentionBiasKey,
    OptionalKey,
    build_shape_mappings,
)
from hlat.model.families.moe_keys import ROUTER_OUTPUT_KEYS, ExpertCountKey
from hlat.model.families.rotary_keys import RotaryKeys

FAMILY = Family(
    name="olmoe",
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    mappings=(
        *build_shape_mappings(rms_norm_eps=1e-5),
        ActivationKey(),
        AttentionBiasKey(),
        RotaryKeys(),
        ExpertCountKey(64),
        OptionalKey("num_experts_per_tok", "mlp.moe.experts_per_token", int, 8),
        OptionalKey("norm_topk_prob", "mlp.moe.normalize_top_k", bool, False),
    ),
    fixed={
        "attention.qk_norm": True,
        "attention.qk_norm_scope": QKNormScope.projection,
        "mlp.kind": "moe",
    },
    ignored_keys=ROUTER_OUTPUT_KEYS,
    heads_divide_hidden_size=True,
)
