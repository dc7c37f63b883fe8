"""AdamW and gradient clipping, without a word from the device.

The norm and the clipping coefficient stay on the device as tensors, so that a step never waits for
the host; the engine reads them when a step is logged.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hlat.config.optimizer import Optimizer

_FEW = 1 << 18
"""Elements that are cast to fp32 at a time on a CPU."""


def groups(optimizer: Optimizer, tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups of tensors: norms, which are vectors, apart if they are not decayed."""
    every = list(tensors)
    apart = [] if optimizer.decay_norms else [tensor for tensor in every if tensor.dim() == 1]
    decayed = [tensor for tensor in every if optimizer.decay_norms or tensor.dim() > 1]
    both = [
        {"params": decayed, "weight_decay": optimizer.weight_decay},
        {"params": apart, "weight_decay": 0.0},
    ]
    return [group for group in both if group["params"]]


def settings(optimizer: Optimizer) -> dict[str, Any]:
    """What torch's AdamW is called with: the rate is the peak until another is written."""
    return {
        "lr": optimizer.lr,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }


def build(optimizer: Optimizer, tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW over the given tensors: the weights, or the master weights of a recipe that has them.

    Moments take the dtype of the tensors. The engine writes each step's rate into `param_groups`.

    Args:
        optimizer: Betas, eps, weight decay and the peak rate.
        tensors: On one device type.
    """
    grouped = groups(optimizer, tensors)
    try:
        return torch.optim.AdamW(grouped, **settings(optimizer), fused=True)
    except RuntimeError:  # torch has no fused kernel for this device type
        return torch.optim.AdamW(grouped, **settings(optimizer))


def step(optimizer: Any, skip: Tensor) -> None:
    """Update by the gradients, or leave everything as it is.

    torch's fused kernels take the decision on the device, as they do for its gradient scaler;
    elsewhere the host must ask.

    Args:
        optimizer: One of `build`, or one that knows `found_inf`.
        skip: Whether to leave everything as it is; a bool on the device.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, skip.float()
        optimizer.step()
    elif not skip:
        optimizer.step()


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The l2 norm of all elements of all tensors, accumulated in fp32 whatever their dtype.

    It is taken along the last dimension first, then over the rows, then over the tensors: on a CPU,
    PyTorch's norm of tens of millions of elements at once is off by 1e-3 in fp32, which clipping
    would turn into a difference between layouts.

    Args:
        tensors: At least one, all on one device.

    Returns:
        A scalar, fp32, on that device.
    """
    l2 = torch.linalg.vector_norm
    norm: Tensor = l2(torch.stack([l2(_row_norms(tensor)) for tensor in tensors]))
    return norm


def _row_norms(tensor: Tensor) -> Tensor:
    """The l2 norm along the last dimension, in fp32.

    A CPU makes a copy in fp32 for it: of a few rows at a time, for its caches and for memory.
    """
    l2 = torch.linalg.vector_norm
    if tensor.is_cpu and tensor.dim() > 1 and tensor.dtype != torch.float32:
        pieces = torch.split(tensor, max(1, _FEW // tensor.shape[-1]))
        return torch.cat([l2(piece, dim=-1, dtype=torch.float32) for piece in pieces])
    norms: Tensor = l2(tensor, dim=-1, dtype=torch.float32)
    return norms


@torch.no_grad()
def clip_(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`.

    The coefficient is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_.

    Args:
        gradients: What to scale.
        max_norm: Largest norm; 0: no clipping.
        norm: Their global norm, over all ranks that share the model; a scalar on their device.
    """
    if max_norm == 0:
        return
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, coefficient)
