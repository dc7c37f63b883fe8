"""transformers' LlamaForCausalLM, as its guide trains it without a Trainer."""

import torch
from contestants import Settings
from plain_loop import PlainLoop, weights_dtype
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def open_trainer(settings: Settings) -> PlainLoop:
    """Attention is torch's own; no cache of keys and values, which training does not read."""
    model = settings.config.model
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        max_position_embeddings=settings.config.batch.sequence_length,
        tie_word_embeddings=model.tie_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device(settings.device):
        llama = LlamaForCausalLM(config).to(weights_dtype(settings))
    call = torch.compile(llama) if settings.compiled else llama

    def loss_of(tokens: Tensor) -> Tensor:
        return call(input_ids=tokens, labels=tokens).loss

    return PlainLoop(settings, llama, loss_of)
