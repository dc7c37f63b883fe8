"""Update rule of AdamW, and torch's fused kernel for it."""

from typing import Any

import torch
from torch import Tensor

from hlat.config.components import set_implementation
from hlat.optim import adamw_spec
from hlat.optim.update_rule import FusedKernel, UpdateRule

_FUSED_TOLERANCE = 1e-2
"""Largest error of the update of one element, for weights in bf16."""


def compute_adamw_update(
    values: list[Tensor], step: Tensor, lr: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the new weights and moments (arXiv 1711.05101, algorithm 2) as computed by torch."""
    gradient, param, exp_avg, exp_avg_sq = values
    beta1, beta2 = group["betas"]
    exp_avg = torch.lerp(exp_avg, gradient, 1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)
    corrections = [1 - torch.pow(beta, step.to(lr.dtype)) for beta in (beta1, beta2)]
    denominator = (exp_avg_sq / corrections[1]).sqrt() + group["eps"]
    decayed = param * (1 - lr * group["weight_decay"])
    return [decayed - lr / corrections[0] * exp_avg / denominator, exp_avg, exp_avg_sq]


@torch.no_grad()
def has_fused_adamw(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a device has torch's fused AdamW kernel, and one element is updated correctly.

    torch accepts `fused=True` for every device outside of torch. Without a kernel, the first step
    would fail, or a fallback would copy all tensors to the CPU and back in each step.
    """
    key = torch._C._dispatch_key_for_device(device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key):
        return False
    values = [torch.full((1,), x, dtype=dtype, device=device) for x in (1.0, 1.0, 0.0, 0.0)]
    step = torch.ones((), dtype=torch.float32, device=device)
    group = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5}
    try:
        for skip in (1.0, 0.0):  # the second call updates
            fused_adamw_([[one] for one in values], [step], 0.5, group, torch.full_like(step, skip))
    except RuntimeError:  # NotImplementedError is one
        return False
    # Decay leaves 0.75 of the weight; the first update of AdamW has the size of the rate
    return abs(float(values[1]) - 0.25) < _FUSED_TOLERANCE


def fused_adamw_(
    values: list[list[Tensor]],
    steps: list[Tensor],
    lr: float,
    group: dict[str, Any],
    found_inf: Tensor | None,
) -> None:
    """Update weights and moments, given gradients, weights and both moments of one dtype.

    The kernel is called directly: torch.optim's wrapper costs as much as a small chunk.
    """
    beta1, beta2 = group["betas"]
    gradients, params, exp_avgs, exp_avg_sqs = values
    torch._fused_adamw_(
        params,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )


ADAMW = UpdateRule(compute_adamw_update, FusedKernel(has_fused_adamw, fused_adamw_))
set_implementation("optimizer", adamw_spec.NAME, ADAMW)
