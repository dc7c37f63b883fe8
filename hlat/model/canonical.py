"""The parameters of a Llama decoder under their canonical names, which are Hugging Face's.

Every layout, engine and checkpoint meets at these names and shapes: they fix the initial values,
key the store, and are what is exported. What only follows from them, the count and the arithmetic
of a token, stands here too, free of torch, so a planner on a login node has it.
"""

import math
from dataclasses import dataclass
from enum import Enum

from hlat.config.model import Model, ScaledInit


class Kind(Enum):
    """How a parameter is initialised."""

    matrix = "matrix"
    """Normal with init_std."""
    residual = "residual"
    """A matrix that writes to the residual stream (o_proj, down_proj): scaled_init applies."""
    norm = "norm"
    """Ones."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model.

    Attributes:
        name: Canonical name, such as `model.layers.0.mlp.down_proj.weight`.
        shape: Global shape; matrices are [out, in], as torch.nn.Linear keeps them.
        kind: How it is initialised.
        layer: 0-based decoder layer; None outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = Kind.matrix
    layer: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def parameters(model: Model) -> tuple[Parameter, ...]:
    """Every parameter in the order of the forward pass, named and shaped as in transformers."""
    vocabulary = (model.vocab_size, model.hidden_size)
    layers = (p for layer in range(model.num_layers) for p in _layer_parameters(model, layer))
    head = () if model.tie_embeddings else (Parameter("lm_head.weight", vocabulary),)
    return (
        Parameter("model.embed_tokens.weight", vocabulary),
        *layers,
        Parameter("model.norm.weight", (model.hidden_size,), Kind.norm),
        *head,
    )


def num_parameters(model: Model) -> int:
    """Number of weights of the whole model; a tied head counts once."""
    return sum(parameter.numel for parameter in parameters(model))


def flops_per_token(model: Model, sequence_length: int) -> float:
    """Floating-point operations that training spends on one token, forward and backward.

    F = 3 [L (4 h^2 + 4 h h_kv + 6 h I + 2 s h) + 2 V h] with h_kv = key/value heads x head size.
    Attention counts its causal half, 2 s h; the head counts once, the embedding look-up and
    recomputation not at all. This is the convention that reproduces the MFU figures that AWS Neuron
    publishes: 42.86 GF for 7B at 4096 tokens.

    Args:
        model: Shape of the model.
        sequence_length: Tokens per sequence, s.

    Returns:
        FLOP per token.
    """
    h, s = model.hidden_size, sequence_length
    h_kv = model.num_key_value_heads * model.head_dim
    layer = 4 * h * h + 4 * h * h_kv + 6 * h * model.intermediate_size + 2 * s * h
    return 3.0 * (model.num_layers * layer + 2 * model.vocab_size * h)


def initial_std(parameter: Parameter, model: Model) -> float | None:
    """Standard deviation of a parameter's initial values; None: they are ones.

    Source: HLAT paper, section IV-C, for the scaling by 1-based layer; the released HLAT scripts
        for the scaling by depth.
    """
    if parameter.kind is Kind.norm:
        return None
    if parameter.kind is Kind.residual and parameter.layer is not None:
        return model.init_std * _residual_scale(model, parameter.layer)
    return model.init_std


def _residual_scale(model: Model, layer: int) -> float:
    if model.scaled_init is ScaledInit.depth:
        return 1 / math.sqrt(2 * model.num_layers)
    if model.scaled_init is ScaledInit.layer:
        return 1 / math.sqrt(2 * (layer + 1))
    return 1.0


def _layer_parameters(model: Model, layer: int) -> tuple[Parameter, ...]:
    hidden, intermediate = model.hidden_size, model.intermediate_size
    key_value = model.num_key_value_heads * model.head_dim

    def parameter(name: str, *shape: int, kind: Kind = Kind.matrix) -> Parameter:
        return Parameter(f"model.layers.{layer}.{name}.weight", shape, kind, layer)

    return (
        parameter("input_layernorm", hidden, kind=Kind.norm),
        parameter("self_attn.q_proj", hidden, hidden),
        parameter("self_attn.k_proj", key_value, hidden),
        parameter("self_attn.v_proj", key_value, hidden),
        parameter("self_attn.o_proj", hidden, hidden, kind=Kind.residual),
        parameter("post_attention_layernorm", hidden, kind=Kind.norm),
        parameter("mlp.gate_proj", intermediate, hidden),
        parameter("mlp.up_proj", intermediate, hidden),
        parameter("mlp.down_proj", hidden, intermediate, kind=Kind.residual),
    )


def rows_at_once(width: int) -> int:
    """Positions whose logits are made at a time, by a head of so many tokens.

    From 512 on its matrix products run at full speed, whatever the vocabulary. A part of it takes
    more, since those that hold the parts have to meet for each of them.
    """
    return max(512, (1 << 21) // width)
