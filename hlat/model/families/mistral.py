"""Mistral 7B: one sliding window in all layers, or none."""

from hlat.model.families.family import Family
from hlat.model.families.key_mappings import ActivationKey, build_shape_mappings
from hlat.model.families.layer_keys import WindowKey
from hlat.model.families.rotary_keys import RotaryKeys

FAMILY = Family(
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    mappings=(
        *build_shape_mappings(num_key_value_heads=8),
        ActivationKey(),
        RotaryKeys(),
        WindowKey(),
    ),
)
