"""Specification of the feed-forward network: settings, parameters and cost, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hlat.config.components import get_spec, register_component
from hlat.model.activation_spec import (
    ActivationLifetime,
    ActivationTensor,
    ExecutionSettings,
    ParallelRegion,
)
from hlat.model.parameter_spec import (
    ModuleParameter,
    ParameterRole,
    ParameterSpec,
    ShardingRule,
)

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


class Activation(Enum):
    """Nonlinearity of the feed-forward network."""

    swiglu = "swiglu"
    """silu(gate) * up (arXiv 2002.05202)."""
    geglu = "geglu"
    """gelu(gate) * up with the tanh approximation of GELU (Gemma)."""
    relu2 = "relu2"
    """relu(x)^2 without gate (arXiv 2109.08668)."""
    gelu = "gelu"
    """gelu(x) without gate, with the tanh approximation (GPT-2)."""

    @property
    def is_gated(self) -> bool:
        """True if a second projection, the gate, multiplies the first."""
        return self in (Activation.swiglu, Activation.geglu)


_NUM_TEMPORARIES = {
    Activation.swiglu: 7,
    Activation.geglu: 7,
    Activation.relu2: 4,
    Activation.gelu: 2,
}
"""Temporaries of the backward pass, in tensors of intermediate_size elements. swiglu and geglu:
gradients of the product, of gate and of up, copies of gate and its activation, and the two
gradients concatenated. relu2: gradients of the square and of relu(x), 2 relu(x) and, with selective
checkpointing, relu(x). gelu: both gradients."""


@dataclass
class MLPConfig:
    """Feed-forward network; its width is model.intermediate_size."""

    activation: Activation = Activation.swiglu
    """Nonlinearity, with or without gate."""
    kind: str = "dense"
    """Kind of network: dense, or one of an extension."""


class MLPSpec:
    """Specification of a dense network; other kinds replace some methods."""

    def find_conflicts(self, model: ModelConfig) -> Iterator[str]:
        """Yield an error message for each pair of settings that conflict."""
        yield from ()

    def list_parameters(self, model: ModelConfig) -> tuple[ModuleParameter, ...]:
        """Return the parameters of the feed-forward network of one layer."""
        hidden, intermediate = model.hidden_size, model.intermediate_size
        up = _build_column("mlp.up_proj.weight", intermediate, hidden)
        first = ModuleParameter("mlp.up_proj.weight", (up,), _count_blocks(model))
        if model.mlp.activation.is_gated:
            gate = _build_column("mlp.gate_proj.weight", intermediate, hidden)
            first = ModuleParameter("mlp.gate_up_proj.weight", (gate, up), _count_blocks(model))
        down = ParameterSpec(
            "mlp.down_proj.weight", (hidden, intermediate), ParameterRole.residual, ShardingRule.row
        )
        return first, ModuleParameter("mlp.down_proj.weight", (down,))

    def list_activations(
        self, model: ModelConfig, execution: ExecutionSettings
    ) -> tuple[ActivationTensor, ...]:
        """Return the activations of a layer.

        relu2 saves relu(x) instead of x, unless checkpointing saves x.
        """
        activation, shard = model.mlp.activation, ParallelRegion.tensor_parallel
        numel = model.intermediate_size / execution.tp
        num_inputs, num_temporaries = 1 + activation.is_gated, _NUM_TEMPORARIES[activation]
        return (
            ActivationTensor(
                "input of the first projections", model.hidden_size, ParallelRegion.column_input
            ),
            ActivationTensor("input of the nonlinearity", num_inputs * numel, shard),
            ActivationTensor("input of the last projection", numel, shard),
            ActivationTensor(
                "temporaries", num_temporaries * numel, shard, ActivationLifetime.workspace
            ),
        )


def compute_block_size(model: ModelConfig) -> int:
    """Return the rows per block of gate_up_proj, which alternates gate and up blocks.

    A tensor-parallel degree divides both the query heads and I, so gcd(I, heads) block pairs are
    the longest blocks of which each shard has complete pairs. Long blocks keep the result of SwiGLU
    contiguous; with blocks of one row it takes twice as long on a CPU.
    """
    return model.intermediate_size // _count_blocks(model)


def _count_blocks(model: ModelConfig) -> int:
    return math.gcd(model.intermediate_size, model.num_attention_heads)


def _build_column(name: str, num_rows: int, num_columns: int) -> ParameterSpec:
    shape, role = (num_rows, num_columns), ParameterRole.matrix
    return ParameterSpec(name, shape, role, ShardingRule.column)


def get_mlp_spec(model: ModelConfig) -> MLPSpec:
    """Return the specification of a model's kind of feed-forward network."""
    spec: MLPSpec = get_spec("model.mlp", model.mlp.kind)
    return spec


register_component("model.mlp", "dense", "One network for all tokens.", MLPSpec())
