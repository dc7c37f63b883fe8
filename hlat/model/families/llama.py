"""Llama 2, 3, 3.1 and 3.2."""

from hlat.model.families.family import Family
from hlat.model.families.key_mappings import ActivationKey, AttentionBiasKey, build_shape_mappings
from hlat.model.families.rotary_keys import RotaryKeys

FAMILY = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    mappings=(
        *build_shape_mappings(),
        ActivationKey(),
        AttentionBiasKey(),
        RotaryKeys(),
    ),
    heads_divide_hidden_size=True,
)
