"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from hlat.model.families.family import Family, HFConfig, get_number
from hlat.model.families.key_mappings import ActivationKey, build_shape_mappings
from hlat.model.families.layer_keys import LayerTypeKeys
from hlat.model.families.rotary_keys import RotaryKeys


def list_sliding_layers(config: HFConfig, window: int | None) -> list[bool]:
    """Return for each layer True if it is sliding: those from max_window_layers on."""
    start = get_number({"max_window_layers": 28, **config}, "max_window_layers", int)
    layers = range(config["num_hidden_layers"])
    return [window is not None and layer >= start for layer in layers]


QWEN_LAYER_TYPE_KEYS = LayerTypeKeys(
    4096, list_sliding_layers, further_keys=("max_window_layers",), has_switch=True
)

FAMILY = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    mappings=(
        *build_shape_mappings(num_key_value_heads=32),
        ActivationKey(),
        RotaryKeys(),
        QWEN_LAYER_TYPE_KEYS,
    ),
    fixed={"attention.qkv_bias": True},
)
