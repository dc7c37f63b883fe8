"""Qwen3: QK-norm per head."""

from hlat.model.families.family import Family
from hlat.model.families.key_mappings import ActivationKey, AttentionBiasKey, build_shape_mappings
from hlat.model.families.qwen2 import QWEN_LAYER_TYPE_KEYS
from hlat.model.families.rotary_keys import RotaryKeys

FAMILY = Family(
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    mappings=(
        *build_shape_mappings(num_key_value_heads=32, head_dim=128),
        ActivationKey(),
        AttentionBiasKey(),
        RotaryKeys(),
        QWEN_LAYER_TYPE_KEYS,
    ),
    fixed={"attention.qk_norm": True},
)
