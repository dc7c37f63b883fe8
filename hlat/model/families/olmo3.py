"""OLMo 3: OLMo 2 with three sliding layers per full layer."""

from hlat.model.families.family import Family, HFConfig
from hlat.model.families.key_mappings import ActivationKey, AttentionBiasKey, build_shape_mappings
from hlat.model.families.layer_keys import LayerTypeKeys
from hlat.model.families.olmo2 import OLMO_FIXED_SETTINGS
from hlat.model.families.rotary_keys import LayerTypeRotaryKeys


def _list_sliding_layers(config: HFConfig, _: int | None) -> list[bool]:
    return [(layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])]


FAMILY = Family(
    name="olmo3",
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    mappings=(
        *build_shape_mappings(rms_norm_eps=1e-5),
        ActivationKey(),
        AttentionBiasKey(),
        LayerTypeRotaryKeys(500000.0, 500000.0),
        LayerTypeKeys(4096, _list_sliding_layers),
    ),
    fixed=OLMO_FIXED_SETTINGS,
)
