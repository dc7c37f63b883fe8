"""OLMo 2: norms after attention and MLP, QK-norm over the projections."""

from hlat.model.attention_spec import QKNormScope
from hlat.model.families.family import Family
from hlat.model.families.key_mappings import ActivationKey, AttentionBiasKey, build_shape_mappings
from hlat.model.families.rotary_keys import RotaryKeys
from hlat.model.norm_spec import NormPlacement

OLMO_FIXED_SETTINGS = {
    "norm.placement": NormPlacement.post,
    "attention.qk_norm": True,
    "attention.qk_norm_scope": QKNormScope.projection,
}

FAMILY = Family(
    name="olmo2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    mappings=(
        *build_shape_mappings(rms_norm_eps=1e-5),
        ActivationKey(),
        AttentionBiasKey(),
        RotaryKeys(),
    ),
    fixed=OLMO_FIXED_SETTINGS,
)
