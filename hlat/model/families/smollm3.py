"""SmolLM3: every fourth layer without rotary embedding."""

from hlat.model.families.family import Family, HFConfig
from hlat.model.families.key_mappings import ActivationKey, AttentionBiasKey, build_shape_mappings
from hlat.model.families.layer_keys import LayerTypeKeys, RotaryLayerKeys, list_rotated_layers
from hlat.model.families.rotary_keys import RotaryKeys


def _list_sliding_layers(config: HFConfig, window: int | None) -> list[bool]:
    return [window is not None and not rotates for rotates in list_rotated_layers(config)]


FAMILY = Family(
    name="smollm3",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    mappings=(
        *build_shape_mappings(num_key_value_heads=4, tied=True),
        ActivationKey(),
        AttentionBiasKey(),
        RotaryKeys(default_theta=2000000.0),
        RotaryLayerKeys(),
        LayerTypeKeys(None, _list_sliding_layers, has_switch=True),
    ),
    ignored_keys=("max_window_layers",),
)
