"""Update rule of AdEMAMix (arXiv 2409.03137, algorithm 1)."""

import math
from typing import Any

import torch
from torch import Tensor

from hlat.config.components import set_implementation
from hlat.optim import ademamix_spec
from hlat.optim.update_rule import UpdateRule


def compute_update(
    values: list[Tensor], step: Tensor, lr: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the new weights, moments and slow average; the last has no bias correction."""
    gradient, param, exp_avg, exp_avg_sq, slow = values
    beta1, beta2 = group["betas"]
    count = step.to(lr.dtype)
    alpha, share = compute_mixture(count, group)
    exp_avg = torch.lerp(exp_avg, gradient, 1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)
    slow = torch.lerp(slow, gradient, share)
    corrections = [1 - torch.pow(beta, count) for beta in (beta1, beta2)]
    denominator = (exp_avg_sq / corrections[1]).sqrt() + group["eps"]
    mixture = exp_avg / corrections[0] + alpha * slow
    decayed = param * (1 - lr * group["weight_decay"])
    return [decayed - lr * mixture / denominator, exp_avg, exp_avg_sq, slow]


def compute_mixture(count: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the factor of the slow average, and the share of the gradient in it.

    The share is 1 - beta3 after the warm-up. It is computed without the difference of one and a
    decay near one, which has few digits in fp32.
    """
    log_beta3, progress = math.log(group["beta3"]), torch.ones_like(count)
    if group["warmup_steps"] is None:
        return progress * group["alpha"], -torch.expm1(progress * log_beta3)
    progress = (count / group["warmup_steps"]).clamp(max=1)
    log_beta1 = math.log(group["betas"][0])
    log_decay = log_beta1 * log_beta3 / ((1 - progress) * log_beta3 + progress * log_beta1)
    return progress * group["alpha"], -torch.expm1(log_decay)


set_implementation("optimizer", ademamix_spec.NAME, UpdateRule(compute_update))
