"""Cautious AdamW: only elements that move against their gradient (arXiv 2411.16085).

hlat train extensions=[examples/cautious_adamw.py] optimizer.name=cautious_adamw
"""

from typing import Any

import torch
from torch import Tensor

from hlat.config.components import register_component
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw_spec import AdamWSpec
from hlat.optim.update_rule import UpdateRule


class CautiousAdamWSpec(AdamWSpec):
    """State, settings and gradient source of AdamW; any shard of a parameter can be updated."""

    title = "cautious AdamW"
    nxdt_names = ()

    def get_update_flops(self, role: ParameterRole) -> float:
        return 17


def compute_update(
    values: list[Tensor], step: Tensor, lr: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the new weights and moments.

    The paper divides by the share of updated elements of a parameter, which a shard does not know.
    """
    gradient, param, exp_avg, exp_avg_sq = values
    beta1, beta2 = group["betas"]
    exp_avg = torch.lerp(exp_avg, gradient, 1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)
    corrections = [1 - torch.pow(beta, step.to(lr.dtype)) for beta in (beta1, beta2)]
    denominator = (exp_avg_sq / corrections[1]).sqrt() + group["eps"]
    update = exp_avg / denominator * (exp_avg * gradient > 0)
    decayed = param * (1 - lr * group["weight_decay"])
    return [decayed - lr / corrections[0] * update, exp_avg, exp_avg_sq]


COMPONENT = ("optimizer", "cautious_adamw", "AdamW of elements that agree with the gradient.")
register_component(*COMPONENT, CautiousAdamWSpec(), None, UpdateRule(compute_update))
