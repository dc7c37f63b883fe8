"""transformers' model of the family, as its guide trains it without a Trainer."""

import torch
import transformers
from contestants import Settings
from plain_loop import PlainLoop, load_initial_weights, weights_dtype
from torch import Tensor

from hlat.config.precision import Dtype
from hlat.model.hugging_face_config import build_hf_config

EOS_TOKEN_ID = 0
"""Written to config.json; training does not read it."""


def open_trainer(settings: Settings) -> PlainLoop:
    """Attention is torch's own, except with a soft-cap or sinks, which torch does not support.

    There is no cache of keys and values, which training does not read.
    """
    config = settings.config
    attention = config.model.attention
    keys = build_hf_config(config.model, config.batch.sequence_length, EOS_TOKEN_ID, Dtype.fp32)
    hf_config = transformers.AutoConfig.for_model(**keys)
    hf_config.use_cache = False
    has_softmax_of_torch = attention.logit_softcap is None and not attention.sinks
    hf_config._attn_implementation = "sdpa" if has_softmax_of_torch else "eager"
    model_class = getattr(transformers, keys["architectures"][0])
    with torch.device(settings.device):
        model = model_class(hf_config).to(weights_dtype(settings))
    missing, unexpected = model.load_state_dict(load_initial_weights(settings), strict=False)
    assert set(missing) <= {"lm_head.weight"}, f"{missing}"
    assert not unexpected, f"{unexpected}"
    call = torch.compile(model) if settings.compiled else model

    def loss_of(tokens: Tensor) -> Tensor:
        return call(input_ids=tokens, labels=tokens).loss

    return PlainLoop(settings, model, loss_of)
