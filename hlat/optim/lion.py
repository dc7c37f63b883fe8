"""Update rule of Lion (arXiv 2302.06675, algorithm 2)."""

from typing import Any

import torch
from torch import Tensor

from hlat.config.components import set_implementation
from hlat.optim import lion_spec
from hlat.optim.update_rule import UpdateRule


def compute_update(
    values: list[Tensor], step: Tensor, lr: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the new weights and momentum."""
    gradient, param, exp_avg = values
    beta1, beta2 = group["betas"]
    direction = torch.lerp(exp_avg, gradient, 1 - beta1).sign()
    decayed = param * (1 - lr * group["weight_decay"])
    return [decayed - lr * direction, torch.lerp(exp_avg, gradient, 1 - beta2)]


set_implementation("optimizer", lion_spec.NAME, UpdateRule(compute_update))
