"""Names, shapes and FLOPs of a Llama decoder's parameters, without torch.

Canonical names and shapes are those of Hugging Face's state_dict. They seed initialization and key
checkpoints, independently of engine and parallel layout.
"""

import math
from dataclasses import dataclass
from enum import Enum

from hlat.config.model import ModelConfig, ScaledInit


class ParameterRole(Enum):
    """Role of a parameter, which determines its initialization."""

    matrix = "matrix"
    """Normal with init_std."""
    residual = "residual"
    """Matrix that writes to the residual stream (o_proj, down_proj); scaled_init applies."""
    norm = "norm"
    """Ones."""


@dataclass(frozen=True)
class ParameterSpec:
    """Specification of one parameter of the full model.

    Attributes:
        name: Canonical name, such as `model.layers.0.mlp.down_proj.weight`.
        shape: Global shape; matrices are [out, in] as in torch.nn.Linear.
        role: Role, which determines the initialization.
        layer: 0-based decoder layer; None outside of the layers.
    """

    name: str
    shape: tuple[int, ...]
    role: ParameterRole = ParameterRole.matrix
    layer: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def list_parameter_specs(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Return every parameter in the order of the forward pass, named as in transformers."""
    embedding = (model.vocab_size, model.hidden_size)
    layers = (
        spec
        for layer in range(model.num_layers)
        for spec in _list_layer_parameter_specs(model, layer)
    )
    head = () if model.tie_embeddings else (ParameterSpec("lm_head.weight", embedding),)
    return (
        ParameterSpec("model.embed_tokens.weight", embedding),
        *layers,
        ParameterSpec("model.norm.weight", (model.hidden_size,), ParameterRole.norm),
        *head,
    )


def count_parameters(model: ModelConfig) -> int:
    """Return the number of weights of the full model; a tied head counts once."""
    return sum(spec.numel for spec in list_parameter_specs(model))


def compute_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the FLOPs of one training token, forward and backward.

    F = 3 [L (4 h^2 + 4 h h_kv + 6 h I + 2 s h) + 2 V h] with h_kv = key/value heads x head size.
    Attention counts its causal half, 2 s h. The head counts once; embedding lookup and
    recomputation do not count. This convention reproduces the MFU figures that AWS Neuron
    publishes: 42.86 GF for 7B at 4096 tokens.

    Args:
        model: Model shape.
        sequence_length: Tokens per sequence, s.
    """
    h, s = model.hidden_size, sequence_length
    h_kv = model.num_key_value_heads * model.head_dim
    layer = 4 * h * h + 4 * h * h_kv + 6 * h * model.intermediate_size + 2 * s * h
    return 3.0 * (model.num_layers * layer + 2 * model.vocab_size * h)


def compute_init_std(parameter: ParameterSpec, model: ModelConfig) -> float | None:
    """Return the standard deviation of the initial values; None if they are ones.

    Sources: HLAT paper, section IV-C, for scaling by 1-based layer; the released HLAT scripts for
    scaling by depth.
    """
    if parameter.role is ParameterRole.norm:
        return None
    if parameter.role is ParameterRole.residual and parameter.layer is not None:
        return model.init_std * _compute_residual_scale(model, parameter.layer)
    return model.init_std


def _compute_residual_scale(model: ModelConfig, layer: int) -> float:
    if model.scaled_init is ScaledInit.depth:
        return 1 / math.sqrt(2 * model.num_layers)
    if model.scaled_init is ScaledInit.layer:
        return 1 / math.sqrt(2 * (layer + 1))
    return 1.0


def _list_layer_parameter_specs(model: ModelConfig, layer: int) -> tuple[ParameterSpec, ...]:
    hidden, intermediate = model.hidden_size, model.intermediate_size
    kv_size = model.num_key_value_heads * model.head_dim
    matrix, residual, norm = ParameterRole
    return tuple(
        ParameterSpec(f"model.layers.{layer}.{name}.weight", shape, role, layer)
        for name, shape, role in (
            ("input_layernorm", (hidden,), norm),
            ("self_attn.q_proj", (hidden, hidden), matrix),
            ("self_attn.k_proj", (kv_size, hidden), matrix),
            ("self_attn.v_proj", (kv_size, hidden), matrix),
            ("self_attn.o_proj", (hidden, hidden), residual),
            ("post_attention_layernorm", (hidden,), norm),
            ("mlp.gate_proj", (intermediate, hidden), matrix),
            ("mlp.up_proj", (intermediate, hidden), matrix),
            ("mlp.down_proj", (hidden, intermediate), residual),
        )
    )


def logit_chunk_size(num_tokens: int) -> int:
    """Return the number of positions whose logits are computed at once for a (local) vocabulary.

    From 512 positions on, the GEMM of the head runs at full speed for any vocabulary. A
    tensor-parallel shard of the vocabulary uses more, since each chunk costs collectives.
    """
    return max(512, (1 << 21) // num_tokens)
