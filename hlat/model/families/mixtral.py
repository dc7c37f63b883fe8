"""Mixtral: Mistral with experts in all layers."""

from hlat.model.families.family import Family
from hlat.model.families.key_mappings import ActivationKey, OptionalKey, build_shape_mappings
from hlat.model.families.layer_keys import WindowKey
from hlat.model.families.moe_keys import ROUTER_OUTPUT_KEYS, ExpertCountKey
from hlat.model.families.rotary_keys import RotaryKeys

FAMILY = Family(
    name="mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    mappings=(
        *build_shape_mappings(num_key_value_heads=8, rms_norm_eps=1e-5),
        ActivationKey(),
        RotaryKeys(1000000.0),
        WindowKey(None),
        ExpertCountKey(8),
        OptionalKey("num_experts_per_tok", "mlp.moe.experts_per_token", int, 2),
    ),
    fixed={"mlp.kind": "moe"},
    ignored_keys=ROUTER_OUTPUT_KEYS,
    tensor_names=(
        (".mlp.gate.", ".block_sparse_moe.gate."),
        (".mlp.experts.", ".block_sparse_moe.experts."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
)
