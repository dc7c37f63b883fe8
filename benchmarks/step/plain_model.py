"""Llama in plain PyTorch: nn.Linear, SDPA, F.rms_norm, F.cross_entropy.

Parameters have the names of transformers. torch.compile compiles the complete model.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from contestants import Settings
from plain_loop import PlainLoop, load_initial_weights, next_tokens, weights_dtype
from torch import Tensor, nn

from hlat.config.model import ModelConfig


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model.hidden_size))
        self.eps = model.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_dim, hidden = model.head_dim, model.hidden_size
        queries = model.num_attention_heads * model.head_dim
        keys = model.num_key_value_heads * model.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (apply_rope(x, cos, sin) for x in (q, k))
        is_gqa = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_gqa)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP with residual connections."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(model), Attention(model)
        self.post_attention_layernorm, self.mlp = Norm(model), Mlp(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Decoder that maps token ids to logits."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.model.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.model.norm = Norm(model)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self.head_dim, self.theta = model.head_dim, model.rope_theta

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        exponents = torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(positions, self.theta**-exponents).repeat(1, 2)
        cos, sin = (values.to(x.dtype) for values in (angles.cos(), angles.sin()))
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to queries or keys."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def open_trainer(settings: Settings) -> PlainLoop:
    """Build the model in this shape."""
    with torch.device(settings.device):
        model = Llama(settings.config.model).to(weights_dtype(settings))
    model.load_state_dict(load_initial_weights(settings))
    call = torch.compile(model) if settings.compiled else model

    def compute_loss(tokens: Tensor) -> Tensor:
        logits = call(tokens).flatten(0, 1)
        return F.cross_entropy(logits.float(), next_tokens(tokens).flatten())

    return PlainLoop(settings, model, compute_loss)
