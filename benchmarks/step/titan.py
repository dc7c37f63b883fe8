"""torchtitan's Llama 3 as of its last release, 0.3.0, with the chunked loss of its recipes.

Attention is its ScaledDotProductAttention, which knows batches of unbroken sequences; its other
kinds ask for a GPU or for masks by document. Compiled as its own parallelize_llama does: every
block, and the loss.
"""

import sys
from os import environ

import torch
from contestants import Settings
from plain_loop import PlainLoop, next_tokens, weights_dtype
from torch import Tensor

sys.path.insert(0, f"{environ.get('PEERS', 'peers')}/torchtitan-0.3.0")

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention


def open_trainer(settings: Settings) -> PlainLoop:
    """Llama 3's modules in this shape."""
    titan = make_config(settings).build()
    titan.to(settings.device)
    titan.init_states()
    titan.to(weights_dtype(settings))
    titan._skip_lm_head = True
    compiling = CompileConfig(enable=settings.compiled)
    loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()).build(
        compile_config=compiling
    )
    loss.set_lm_head(titan.lm_head)
    if settings.compiled:
        for block in titan.layers.values():
            block.compile(backend=compiling.backend, fullgraph=True)

    def loss_of(tokens: Tensor) -> Tensor:
        targets = next_tokens(tokens)
        counted = torch.tensor(targets.numel() - len(targets), device=targets.device)
        return loss(titan(tokens), targets, counted)[0]

    return PlainLoop(settings, titan, loss_of)


def make_config(settings: Settings) -> llama3.Llama3Model.Config:
    """What torchtitan's own tables hold for its sizes."""
    model = settings.config.model
    layers = llama3._build_llama3_layers(
        n_layers=model.num_layers,
        dim=model.hidden_size,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        hidden_dim=model.intermediate_size,
        rope=ComplexRoPE.Config(
            dim=model.head_dim,
            max_seq_len=settings.config.batch.sequence_length,
            theta=model.rope_theta,
        ),
        attn_backend="varlen",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        for norm in (layer.attention_norm, layer.ffn_norm):
            norm.eps = model.rms_norm_eps
    return llama3.Llama3Model.Config(
        dim=model.hidden_size,
        vocab_size=model.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size,
            embedding_dim=model.hidden_size,
            param_init=llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(
            normalized_shape=model.hidden_size,
            eps=model.rms_norm_eps,
            param_init=llama3._NORM_INIT,
        ),
        lm_head=Linear.Config(
            in_features=model.hidden_size,
            out_features=model.vocab_size,
            param_init=llama3._output_linear_init(model.hidden_size),
        ),
        layers=layers,
    )
