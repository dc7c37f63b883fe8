"""Gemma 3 (text): Gemma 2 with QK-norm per head and another rotary base in sliding layers.

transformers ignores attn_logit_softcapping in this family, so it must be null.
"""

from hlat.config.config_errors import ConfigError
from hlat.model.families.family import Family, HFConfig, get_number
from hlat.model.families.gemma2 import GEMMA_FIXED_SETTINGS
from hlat.model.families.key_mappings import (
    ActivationKey,
    AttentionBiasKey,
    OptionalKey,
    QueryScaleKey,
    build_shape_mappings,
)
from hlat.model.families.layer_keys import LayerTypeKeys
from hlat.model.families.rotary_keys import LayerTypeRotaryKeys


def _list_sliding_layers(config: HFConfig, _: int | None) -> list[bool]:
    key = "sliding_window_pattern"
    pattern = get_number({key: 6, **config}, key, int)
    if pattern < 1:
        raise ConfigError(f"config.json has {key}={pattern}; it must be positive")
    return [(layer + 1) % pattern != 0 for layer in range(config["num_hidden_layers"])]


FAMILY = Family(
    name="gemma3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    mappings=(
        *build_shape_mappings(num_key_value_heads=4, head_dim=256, tied=True),
        ActivationKey("hidden_activation", "gelu_pytorch_tanh"),
        AttentionBiasKey(),
        QueryScaleKey(),
        LayerTypeRotaryKeys(1000000.0, 10000.0, "rope_local_base_freq"),
        LayerTypeKeys(4096, _list_sliding_layers, further_keys=("sliding_window_pattern",)),
        OptionalKey("final_logit_softcapping", "head.logit_softcap", float, None, True),
    ),
    fixed={**GEMMA_FIXED_SETTINGS, "attention.qk_norm": True},
    ignored_keys=("hidden_act", "_sliding_window_pattern"),
    heads_divide_hidden_size=True,
)
