"""Lion: the sign of an interpolation of momentum and gradient (arXiv 2302.06675, algorithm 2).

    hlat train extensions=[examples/lion.py] optimizer.name=lion optimizer.lr=3e-4

It needs a smaller learning rate and a larger weight decay than AdamW; beta2 of the paper is 0.99.
"""

from typing import Any

import torch
from torch import Tensor

from hlat.config.components import register_component
from hlat.config.optimizer import OptimizerConfig
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import OptimizerSpec, StateTensor
from hlat.optim.update_rule import UpdateRule


class LionSpec(OptimizerSpec):
    """One state tensor; any shard of a parameter can be updated."""

    title = "Lion"

    def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
        return (StateTensor("exp_avg", "beta2"),)

    def get_update_flops(self, role: ParameterRole) -> float:
        return 10

    def build_hyperparameters(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> dict[str, Any]:
        return {"betas": (settings.beta1, settings.beta2)}

    def get_gradient_source(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> tuple[str, float]:
        return "exp_avg", 1 - settings.beta2


def compute_update(
    values: list[Tensor], step: Tensor, lr: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the new weights and momentum."""
    gradient, param, exp_avg = values
    beta1, beta2 = group["betas"]
    direction = torch.lerp(exp_avg, gradient, 1 - beta1).sign()
    decayed = param * (1 - lr * group["weight_decay"])
    return [decayed - lr * direction, torch.lerp(exp_avg, gradient, 1 - beta2)]


register_component(
    "optimizer", "lion", "Sign of the momentum.", LionSpec(), None, UpdateRule(compute_update)
)
