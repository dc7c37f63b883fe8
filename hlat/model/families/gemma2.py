"""Gemma 2: norms before and after attention and MLP, soft-capped scores and logits, GeGLU."""

from hlat.model.families.family import Family, HFConfig
from hlat.model.families.key_mappings import (
    ActivationKey,
    AttentionBiasKey,
    OptionalKey,
    QueryScaleKey,
    build_shape_mappings,
)
from hlat.model.families.layer_keys import LayerTypeKeys
from hlat.model.families.rotary_keys import RotaryKeys
from hlat.model.norm_spec import NormPlacement

GEMMA_FIXED_SETTINGS = {
    "norm.placement": NormPlacement.sandwich,
    "norm.zero_centered": True,
    "embedding.scale_by_sqrt_hidden": True,
}


def _list_sliding_layers(config: HFConfig, _: int | None) -> list[bool]:
    return [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]


FAMILY = Family(
    name="gemma2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    mappings=(
        *build_shape_mappings(num_key_value_heads=4, head_dim=256, tied=True),
        ActivationKey("hidden_activation", "gelu_pytorch_tanh"),
        AttentionBiasKey(),
        QueryScaleKey(),
        RotaryKeys(),
        LayerTypeKeys(4096, _list_sliding_layers),
        OptionalKey("attn_logit_softcapping", "attention.logit_softcap", float, 50.0, True),
        OptionalKey("final_logit_softcapping", "head.logit_softcap", float, 30.0, True),
    ),
    fixed=GEMMA_FIXED_SETTINGS,
    ignored_keys=("hidden_act", "sliding_window_size"),
    heads_divide_hidden_size=True,
)
