"""AdamW and the norm of gradients without host synchronization."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hlat.config.optimizer import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in checkpoints; each has the shape of its parameter."""

_FP32_CHUNK_NUMEL = 1 << 18
"""Elements cast to fp32 at a time on a CPU."""


def build_param_groups(
    optimizer: OptimizerConfig, tensors: Iterable[Tensor]
) -> list[dict[str, Any]]:
    """Return parameter groups; 1-D tensors (norms) form a separate group if not decayed."""
    params = list(tensors)
    decayed = [tensor for tensor in params if optimizer.decay_norms or tensor.dim() > 1]
    not_decayed = [] if optimizer.decay_norms else [t for t in params if t.dim() == 1]
    groups = [
        {"params": decayed, "weight_decay": optimizer.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_adamw_kwargs(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the keyword arguments of torch.optim.AdamW; lr is the peak until it is changed."""
    return {
        "lr": optimizer.lr,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }


def build_adamw(optimizer: OptimizerConfig, tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW over the weights, or the master weights of a recipe that has them.

    Moments have the dtype of the tensors. The engine sets each step's lr in `param_groups`.
    """
    groups = build_param_groups(optimizer, tensors)
    try:
        return torch.optim.AdamW(groups, **build_adamw_kwargs(optimizer), fused=True)
    except RuntimeError:  # torch has no fused kernel for this device type
        return torch.optim.AdamW(groups, **build_adamw_kwargs(optimizer))


def step_optimizer(optimizer: Any, skip: Tensor) -> None:
    """Step the optimizer, or change nothing if the bool scalar `skip` on the device is true.

    Fused kernels evaluate `skip` on the device through torch's gradient scaler interface; other
    implementations synchronize with the host.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, skip.float()
        optimizer.step()
    elif not skip:
        optimizer.step()


def compute_global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the l2 norm of all elements of at least one tensor, an fp32 scalar on their device.

    The norm is taken along the last dimension, then over rows, then over tensors: on a CPU,
    PyTorch's norm of tens of millions of elements at once is off by 1e-3 in fp32, which clipping
    would turn into a difference between layouts.
    """
    l2 = torch.linalg.vector_norm
    norm: Tensor = l2(torch.stack([l2(_compute_row_norms(tensor)) for tensor in tensors]))
    return norm


def _compute_row_norms(tensor: Tensor) -> Tensor:
    """Return the fp32 l2 norm along the last dimension.

    A CPU casts a copy to fp32: a few rows at a time bound its memory and stay in its caches.
    """
    l2 = torch.linalg.vector_norm
    if tensor.is_cpu and tensor.dim() > 1 and tensor.dtype != torch.float32:
        chunks = torch.split(tensor, max(1, _FP32_CHUNK_NUMEL // tensor.shape[-1]))
        return torch.cat([l2(chunk, dim=-1, dtype=torch.float32) for chunk in chunks])
    norms: Tensor = l2(tensor, dim=-1, dtype=torch.float32)
    return norms
