"""Attention whose heads are multiplied by a learned gate (arXiv 2505.06708).

hlat train extensions=[examples/gated_attention.py] model.attention.kind=gated
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hlat.config.bounds import bounded
from hlat.config.components import register_component
from hlat.config.model import ModelConfig
from hlat.model.activation_spec import ActivationTensor, ExecutionSettings, ParallelRegion
from hlat.model.attention import Attention
from hlat.model.attention_spec import AttentionSpec
from hlat.model.linear import Linear
from hlat.model.parameter_spec import ModuleParameter, ParameterRole, ParameterSpec, ShardingRule


@dataclass
class GatedConfig:
    """Gate of each head."""

    scale: float = bounded(2.0, above=0)
    """Factor of the gate; with 2, heads are unchanged where the gate's projection is zero."""


class GatedAttentionSpec(AttentionSpec):
    """One more projection with an output per query head."""

    def list_parameters(self, model: ModelConfig) -> tuple[ModuleParameter, ...]:
        shape, name = (model.num_attention_heads, model.hidden_size), "self_attn.gate_proj.weight"
        gate = ParameterSpec(name, shape, ParameterRole.matrix, ShardingRule.column)
        groups = model.num_key_value_heads
        return (*super().list_parameters(model), ModuleParameter(name, (gate,), groups))

    def list_activations(
        self, model: ModelConfig, layer: int, execution: ExecutionSettings
    ) -> tuple[ActivationTensor, ...]:
        numel = model.num_attention_heads * model.head_dim / execution.tp
        heads = ActivationTensor("heads before the gate", numel, ParallelRegion.tensor_parallel)
        return (*super().list_activations(model, layer, execution), heads)


class GatedAttention(Attention):
    """Grouped-query attention with a sigmoid gate of the layer's input on each head."""

    def __init__(self, model: ModelConfig, layer: int, fp32_norms: bool) -> None:
        super().__init__(model, layer, fp32_norms)
        self.scale = model.attention.gated.scale
        self.gate_proj = Linear(model.hidden_size, model.num_attention_heads, bias=False)

    def forward(self, x_BSH: Tensor, *inputs: object) -> Tensor:
        gate_BSN1 = self.scale * torch.sigmoid(self.gate_proj(x_BSH)).unsqueeze(-1)
        return self.project_output(self.attend(x_BSH, *inputs) * gate_BSN1)


COMPONENT = ("model.attention", "gated", "Attention with a gate per head.")
register_component(*COMPONENT, GatedAttentionSpec(), GatedConfig, GatedAttention)
