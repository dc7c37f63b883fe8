"""Update rule of schedule-free AdamW (arXiv 2405.15682, algorithm 1)."""

from typing import Any

import torch
from torch import Tensor

from hlat.config.components import set_implementation
from hlat.optim import schedule_free_spec
from hlat.optim.update_rule import UpdateRule


def compute_update(
    values: list[Tensor], step: Tensor, lr: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the new y, second moment, z and x; weight decay is that of y."""
    gradient, y, exp_avg_sq, z, x = values
    beta1, beta2 = group["betas"]
    count = step.to(lr.dtype)
    exp_avg_sq = exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)
    denominator = (exp_avg_sq / (1 - torch.pow(beta2, count))).sqrt() + group["eps"]
    z = z - lr * (gradient / denominator + group["weight_decay"] * y)
    x = torch.lerp(x, z, compute_average_weight(count, group["warmup_steps"]))
    return [torch.lerp(z, x, beta1), exp_avg_sq, z, x]


def compute_average_weight(count: Tensor, warmup_steps: int) -> Tensor:
    """Return the weight of the newest z in the average, given the number of updates.

    An update has the weight lr^2, so that the newest has lr^2 over the sum of all. With n/W of the
    peak in a warm-up of W steps this is 6n / ((n + 1)(2n + 1)), and then one over the sum
    (W + 1)(2W + 1) / 6W of the warm-up and the number of later updates. It is a function of the
    number of updates, so that a run resumes exactly, and skipped steps have no weight.
    """
    if warmup_steps == 0:
        return 1 / count
    in_warmup = 6 * count / ((count + 1) * (2 * count + 1))
    of_warmup = (warmup_steps + 1) * (2 * warmup_steps + 1) / (6 * warmup_steps)
    later = 1 / (of_warmup + (count - warmup_steps).clamp(min=0))
    return torch.where(count <= warmup_steps, in_warmup, later)


set_implementation("optimizer", schedule_free_spec.NAME, UpdateRule(compute_update))
