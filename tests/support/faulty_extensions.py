"""Extensions with faults: a wrong backward pass, a wrong sharding rule, a leak of later tokens."""

from tests.conftest import REPOSITORY

HEADER = """
import torch
from torch import nn
from hlat.config.components import register_component
from hlat.model import parameter_spec as ps
from hlat.model.attention import Attention
from hlat.model.attention_spec import AttentionSpec
from hlat.model.mlp import MLP
from hlat.model.mlp_spec import MLPSpec
"""

WRONG_BACKWARD = (
    HEADER
    + """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x  # without the factor of 2


class SquaredMLP(MLP):
    def forward(self, x):
        return self.down_proj(Square.apply(self.activation(self.input_proj(x))))


register_component("model.mlp", "fault", "Squares.", MLPSpec(), implementation=SquaredMLP)
"""
)

WRONG_SHARDING = (
    HEADER
    + """
class ScaledSpec(AttentionSpec):
    def list_parameters(self, model):
        rule = ps.ShardingRule.replicated  # its gradient is that of a rank's heads
        spec = ps.ParameterSpec(
            "self_attn.head_scale", (model.head_dim,), ps.ParameterRole.norm, rule,
            ps.Initialization.ones,
        )
        return (*super().list_parameters(model), ps.ModuleParameter(spec.name, (spec,)))


class ScaledAttention(Attention):
    def __init__(self, model, layer, fp32_norms):
        super().__init__(model, layer, fp32_norms)
        self.head_scale = nn.Parameter(torch.empty(model.head_dim))

    def forward(self, x, *inputs):
        return self.project_output(self.attend(x, *inputs) * self.head_scale)


register_component(
    "model.attention", "fault", "Scaled heads.", ScaledSpec(), implementation=ScaledAttention
)
"""
)

LEAK = (
    HEADER
    + """
class LeakingAttention(Attention):
    def forward(self, x, *inputs):
        heads = self.attend(x, *inputs)
        return self.project_output(heads + 0.1 * heads.roll(-1, 1))


register_component(
    "model.attention", "fault", "Next position.", AttentionSpec(), implementation=LeakingAttention
)
"""
)

RELU_ROUTING = (REPOSITORY / "examples/relu_routing.py").read_text().replace('"relu"', '"fault"')

DETACHED_ROUTER = RELU_ROUTING.replace("router.weight.float()", "router.weight.detach().float()")

WRONG_ROUTER_SHARDING = (
    RELU_ROUTING.replace("ReluSpec())", "WrongSpec())").replace(
        "COMPONENT =",
        """
class WrongSpec(ReluSpec):
    def list_parameters(self, model):
        router, *others = super().list_parameters(model)
        rule = ps.ShardingRule.replicated  # its gradient is that of a rank's part of the experts
        return (replace(router, specs=(replace(router.specs[0], sharding=rule),)), *others)


COMPONENT =""",
    )
    + """from dataclasses import replace
from hlat.model import parameter_spec as ps
"""
)

EXPERT_CHOICE = (
    (REPOSITORY / "examples/expert_choice.py").read_text().replace('"expert_choice"', '"fault"')
)
