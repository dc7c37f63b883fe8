"""litgpt's GPT, with the loss of its pre-training (litgpt/pretrain.py)."""

import torch
from contestants import Settings
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from plain_loop import PlainLoop, next_tokens, weights_dtype
from torch import Tensor


def open_trainer(settings: Settings) -> PlainLoop:
    """The configuration of its Llamas in this shape; compiled whole, as its pre-training does."""
    model = settings.config.model
    config = Config(
        name=model.name,
        block_size=settings.config.batch.sequence_length,
        padded_vocab_size=model.vocab_size,
        vocab_size=model.vocab_size,
        n_layer=model.num_layers,
        n_head=model.num_attention_heads,
        n_embd=model.hidden_size,
        n_query_groups=model.num_key_value_heads,
        intermediate_size=model.intermediate_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=model.rms_norm_eps,
        mlp_class_name="LLaMAMLP",
        rope_base=int(model.rope_theta),
    )
    with torch.device(settings.device):
        gpt = GPT(config)
    gpt.apply(gpt._init_weights)
    gpt.to(weights_dtype(settings))
    call = torch.compile(gpt) if settings.compiled else gpt

    def loss_of(tokens: Tensor) -> Tensor:
        return chunked_cross_entropy(call(tokens), next_tokens(tokens))

    return PlainLoop(settings, gpt, loss_of)
