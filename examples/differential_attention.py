"""Difference of two softmax maps, those of consecutive query heads (arXiv 2410.05258).

hlat train extensions=[examples/differential_attention.py] model.attention.kind=differential
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hlat.config.bounds import bounded
from hlat.config.components import register_component
from hlat.config.model import ModelConfig
from hlat.model import parameter_spec as ps
from hlat.model.attention import Attention
from hlat.model.attention_spec import AttentionSpec
from hlat.model.linear import Linear


@dataclass
class DifferentialConfig:
    """Weight of the second softmax map."""

    init: float = bounded(0.8, min=0, max=1)
    """Initial weight of the second map in deep layers; 0.6 less in the first layer."""


class DifferentialSpec(AttentionSpec):
    """Half as many heads for the output projection, and a weight of the second map per head."""

    def list_parameters(self, model: ModelConfig) -> tuple[ps.ModuleParameter, ...]:
        size, name = model.num_attention_heads // 2, "self_attn.lambdas"
        role, rule, init = ps.ParameterRole.bias, ps.ShardingRule.column, ps.Initialization.zeros
        lambdas = ps.ParameterSpec(name, (size,), role, rule, init)
        *inputs, output = super().list_parameters(model)
        spec = replace(output.specs[0], shape=(model.hidden_size, size * model.head_dim))
        added = ps.ModuleParameter(name, (lambdas,), model.num_key_value_heads)
        return (*inputs, replace(output, specs=(spec,)), added)


class DifferentialAttention(Attention):
    """Attention whose heads are differences of two heads, normalized to a mean square of one."""

    def __init__(self, model: ModelConfig, layer: int, fp32_norms: bool) -> None:
        super().__init__(model, layer, fp32_norms)
        self.init = model.attention.differential.init - 0.6 * math.exp(-0.3 * layer)
        self.lambdas = nn.Parameter(torch.empty(model.num_attention_heads // 2))
        self.o_proj = Linear(len(self.lambdas) * model.head_dim, model.hidden_size, bias=False)

    def forward(self, x_BSH: Tensor, *inputs: object) -> Tensor:
        first_BSPD, second_BSPD = self.attend(x_BSH, *inputs).unflatten(2, (-1, 2)).unbind(3)
        y_BSPD = first_BSPD - (self.init + self.lambdas).unsqueeze(1).to(x_BSH.dtype) * second_BSPD
        scale_BSP1 = torch.rsqrt(y_BSPD.square().mean(-1, keepdim=True) + 1e-5)
        return self.project_output(y_BSPD * scale_BSP1 * (1 - self.init))


COMPONENT = ("model.attention", "differential", "Difference of softmax maps.")
register_component(*COMPONENT, DifferentialSpec(), DifferentialConfig, DifferentialAttention)
