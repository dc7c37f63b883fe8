"""torchtitan's Llama 3, Qwen3 and Qwen3-MoE of its last release, 0.3.0, with its chunked loss.

Attention is its ScaledDotProductAttention for sequences without document boundaries; its other
implementations need a GPU or document masks. Blocks and loss are compiled as in its
parallelize_llama. Experts are its GroupedExperts, which compute in bf16 in every recipe, without
the bias that balances them.
"""

import sys
from collections.abc import Callable
from os import environ
from typing import Any

import torch
from contestants import Settings
from plain_loop import PlainLoop, load_initial_weights, next_tokens, weights_dtype
from torch import Tensor

sys.path.insert(0, f"{environ.get('PEERS', 'peers')}/torchtitan-0.3.0")

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from hlat.model.moe_spec import get_expert_size


def open_trainer(settings: Settings) -> PlainLoop:
    """Build the modules of the family in this shape."""
    make_config, adapter = FAMILIES[settings.config.model.family]
    config = make_config(settings)
    titan = config.build()
    titan.to(settings.device)
    titan.init_states()
    for parameter in titan.parameters():  # the complex buffer of ComplexRoPE must not be converted
        parameter.data = parameter.data.to(weights_dtype(settings))
    titan.load_state_dict(adapter(config, None).from_hf(load_initial_weights(settings)))
    titan._skip_lm_head = True
    compile_config = CompileConfig(enable=settings.compiled)
    loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()).build(
        compile_config=compile_config
    )
    loss.set_lm_head(titan.lm_head)
    if settings.compiled:
        for block in titan.layers.values():
            block.compile(backend=compile_config.backend, fullgraph=True)

    def compute_loss(tokens: Tensor) -> Tensor:
        targets = next_tokens(tokens)
        num_targets = torch.tensor(targets.numel() - len(targets), device=targets.device)
        return loss(titan(tokens), targets, num_targets)[0]

    return PlainLoop(settings, titan, compute_loss)


def make_llama3(settings: Settings) -> Decoder.Config:
    """Return the configuration of torchtitan's presets of Llama 3 in this shape."""
    model = settings.config.model
    layers = llama3._build_llama3_layers(
        n_layers=model.num_layers,
        dim=model.hidden_size,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        hidden_dim=model.intermediate_size,
        rope=ComplexRoPE.Config(**make_rope(settings)),
        attn_backend="varlen",
    )
    return make_decoder(settings, llama3.Llama3Model, layers)


def make_qwen3(settings: Settings) -> Decoder.Config:
    """Return the configuration of torchtitan's presets of Qwen3 in this shape."""
    model = settings.config.model
    layers = qwen3._build_qwen3_layers(
        n_layers=model.num_layers,
        dim=model.hidden_size,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        hidden_dim=model.intermediate_size,
        rope=CosSinRoPE.Config(**make_rope(settings)),
        attn_backend="varlen",
    )
    return make_decoder(settings, qwen3.Qwen3Model, layers)


def make_qwen3_moe(settings: Settings) -> Decoder.Config:
    """Return the configuration of torchtitan's presets of Qwen3-MoE in this shape."""
    model, moe = settings.config.model, settings.config.model.mlp.moe
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=model.num_layers,
        dim=model.hidden_size,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        moe_hidden_dim=get_expert_size(model),
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        rope=CosSinRoPE.Config(**make_rope(settings)),
        attn_backend="varlen",
        moe_comm_backend="standard",
    )
    for layer in layers:
        layer.moe.load_balance_coeff = None
        layer.moe.router.route_norm = moe.normalize_top_k
    return make_decoder(settings, qwen3.Qwen3Model, layers)


def make_rope(settings: Settings) -> dict[str, Any]:
    """Return the settings of the rotary embedding."""
    model = settings.config.model
    return {
        "dim": model.head_dim,
        "max_seq_len": settings.config.batch.sequence_length,
        "theta": model.rope_theta,
    }


def make_decoder(settings: Settings, model_class: Any, layers: list[Any]) -> Decoder.Config:
    """Return the configuration of a decoder with these layers and SDPA."""
    model = settings.config.model
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        for norm in (layer.attention_norm, layer.ffn_norm, layer.attention.qk_norm):
            if norm is not None:
                norm.eps = model.rms_norm_eps
    return model_class.Config(
        dim=model.hidden_size,
        vocab_size=model.vocab_size,
        enable_weight_tying=model.tie_embeddings,
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


FAMILIES: dict[str, tuple[Callable[[Settings], Decoder.Config], type]] = {
    "llama": (make_llama3, Llama3StateDictAdapter),
    "qwen3": (make_qwen3, Qwen3StateDictAdapter),
    "qwen3_moe": (make_qwen3_moe, Qwen3StateDictAdapter),
}
"""Configuration and converter of weights by family."""
