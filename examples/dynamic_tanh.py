"""A tanh with a learned slope in place of normalization (arXiv 2503.10622).

hlat train extensions=[examples/dynamic_tanh.py] model.norm.kind=tanh
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hlat.config.bounds import bounded
from hlat.config.components import register_component
from hlat.config.model import ModelConfig
from hlat.model.norm_spec import NormSpec, build_norm_parameter
from hlat.model.parameter_spec import (
    Initialization,
    ModuleParameter,
    ParameterRole,
    ParameterSpec,
    ShardingRule,
)


@dataclass
class TanhConfig:
    """Slope at initialization."""

    strength: float = bounded(0.5, above=0, max=10)
    """Factor of the learned slope, which is one at initialization."""


class TanhSpec(NormSpec):
    """Slope, weight and bias."""

    def list_parameters(self, model: ModelConfig, name: str) -> tuple[ModuleParameter, ...]:
        rule, ones = ShardingRule.replicated, Initialization.ones
        slope = ParameterSpec(f"{name}.slope", (1,), ParameterRole.norm, rule, ones)
        weight = build_norm_parameter(model, f"{name}.weight", ones)
        bias = build_norm_parameter(model, f"{name}.bias", Initialization.zeros)
        return ModuleParameter(slope.name, (slope,)), weight, bias


class DynamicTanh(nn.Module):
    """Element-wise tanh, then weight and bias."""

    def __init__(self, model: ModelConfig, num_features: int, fp32: bool) -> None:
        super().__init__()
        self.fp32, self.strength = fp32, model.norm.tanh.strength
        self.slope = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(num_features))
        self.bias = nn.Parameter(torch.empty(num_features))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if self.fp32 and x.dtype is torch.bfloat16 else x.dtype
        slope, weight, bias = (p.to(dtype) for p in (self.slope, self.weight, self.bias))
        return (weight * torch.tanh(self.strength * slope * x.to(dtype)) + bias).to(x.dtype)


register_component("model.norm", "tanh", "Dynamic tanh.", TanhSpec(), TanhConfig, DynamicTanh)
