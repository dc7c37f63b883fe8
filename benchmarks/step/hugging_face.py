"""transformers' model of the family, trained as in its guide without a Trainer."""

import torch
import transformers
from contestants import Settings
from plain_loop import PlainLoop, load_initial_weights, weights_dtype
from torch import Tensor

from hlat.config.precision import Dtype
from hlat.model.families.hugging_face_config import build_hf_config

EOS_TOKEN_ID = 0
"""Written to config.json; training does not read it."""


def open_trainer(settings: Settings) -> PlainLoop:
    """Build the model in this shape without a KV cache.

    Attention is SDPA, except with a soft-cap or sinks, which SDPA does not support.
    """
    config = settings.config
    attention = config.model.attention
    keys = build_hf_config(config.model, config.batch.sequence_length, EOS_TOKEN_ID, Dtype.fp32)
    hf_config = transformers.AutoConfig.for_model(**keys)
    hf_config.use_cache = False
    supports_sdpa = attention.logit_softcap is None and not attention.sinks
    hf_config._attn_implementation = "sdpa" if supports_sdpa else "eager"
    model_class = getattr(transformers, keys["architectures"][0])
    with torch.device(settings.device):
        model = model_class(hf_config).to(weights_dtype(settings))
    weights = stack_experts(load_initial_weights(settings), config.model.mlp.moe.num_experts)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, f"{missing}"
    assert not unexpected, f"{unexpected}"
    call = torch.compile(model) if settings.compiled else model

    def compute_loss(tokens: Tensor) -> Tensor:
        return call(input_ids=tokens, labels=tokens).loss

    return PlainLoop(settings, model, compute_loss)


def stack_experts(weights: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """Return the weights with one tensor for the experts of a layer, as transformers has them."""
    stacked = {name: value for name, value in weights.items() if ".experts." not in name}
    for prefix in {name.partition("experts.")[0] for name in weights if ".experts." in name}:
        gate, up, down = (
            torch.stack([weights[f"{prefix}experts.{i}.{kind}.weight"] for i in range(num_experts)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        )
        stacked[f"{prefix}experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        stacked[f"{prefix}experts.down_proj"] = down
    return stacked
