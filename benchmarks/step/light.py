"""litgpt's GPT with the loss of its pre-training (litgpt/pretrain.py)."""

from functools import partial

import torch
from contestants import Settings
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.scripts import convert_hf_checkpoint as convert
from litgpt.utils import chunked_cross_entropy
from plain_loop import PlainLoop, load_initial_weights, next_tokens, weights_dtype
from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.model.attention_spec import LayerType, QKNormScope, get_layer_type
from hlat.model.mlp_spec import Activation
from hlat.model.norm_spec import NormPlacement


def open_trainer(settings: Settings) -> PlainLoop:
    """Build the family in this shape; compile the complete model, as in litgpt's pre-training."""
    model = settings.config.model
    config = make_config(model, settings.config.batch.sequence_length)
    with torch.device(settings.device):
        gpt = GPT(config)
    if model.tie_embeddings:
        gpt.transformer.wte.weight = gpt.lm_head.weight
    gpt.to(weights_dtype(settings))
    gpt.load_state_dict(convert_weights(config, model.family, load_initial_weights(settings)))
    call = torch.compile(gpt) if settings.compiled else gpt

    def compute_loss(tokens: Tensor) -> Tensor:
        return chunked_cross_entropy(call(tokens), next_tokens(tokens))

    return PlainLoop(settings, gpt, compute_loss)


def make_config(model: ModelConfig, sequence_length: int) -> Config:
    """Return the configuration of litgpt's presets in this shape.

    litgpt adds one to the weights of norms if the name contains "Gemma".
    """
    attention, placement = model.attention, model.norm.placement
    sliding = [
        int(get_layer_type(model, layer) is LayerType.sliding) for layer in range(model.num_layers)
    ]
    is_geglu = model.mlp.activation is Activation.geglu
    return Config(
        name=f"Gemma {model.name}" if model.norm.zero_centered else model.name,
        block_size=sequence_length,
        padded_vocab_size=model.vocab_size,
        vocab_size=model.vocab_size,
        n_layer=model.num_layers,
        n_embd=model.hidden_size,
        n_head=model.num_attention_heads,
        n_query_groups=model.num_key_value_heads,
        head_size=model.head_dim,
        attn_bias=attention.qkv_bias,
        norm_qk=attention.qk_norm,
        norm_qk_type="olmo2" if attention.qk_norm_scope is QKNormScope.projection else "default",
        attention_scores_scalar=round(attention.scale**-2) if attention.scale else None,
        attention_logit_softcapping=attention.logit_softcap,
        sliding_window_size=attention.sliding_window,
        sliding_window_indices=sliding,
        rotary_percentage=1.0,
        rope_base=int(model.rope_theta),
        rope_local_base_freq=model.rope.sliding_theta,
        rope_indices=sliding if model.rope.sliding_theta else None,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=model.rms_norm_eps,
        norm_1=placement is not NormPlacement.post,
        norm_2=placement is not NormPlacement.post,
        post_attention_norm=placement is not NormPlacement.pre,
        post_mlp_norm=placement is not NormPlacement.pre,
        intermediate_size=model.intermediate_size,
        mlp_class_name="GemmaMLP" if is_geglu else "LLaMAMLP",
        gelu_approximate="tanh",
        scale_embeddings=model.embedding.scale_by_sqrt_hidden,
        final_logit_softcapping=model.head.logit_softcap,
    )


def convert_weights(config: Config, family: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights with litgpt's converter of the family."""
    converters = {
        "qwen2": partial(convert.copy_weights_qwen_2_5, config),
        "qwen3": partial(convert.copy_weights_qwen_3, config),
        "olmo2": partial(convert.copy_weights_olmo2, config),
        "gemma2": convert.copy_weights_gemma_2,
        "gemma3": convert.copy_weights_gemma_3,
    }
    converted: dict[str, Tensor] = {}
    converters.get(family, partial(convert.copy_weights_hf_llama, config))({}, converted, weights)
    return converted
