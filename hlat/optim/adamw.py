"""AdamW and the norm of gradients without host synchronization."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hlat.config.optimizer import OptimizerConfig
from hlat.optim.tensor_adamw import TensorAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in checkpoints; each has the shape of its parameter."""

_FP32_CHUNK_NUMEL = 1 << 18
"""Elements cast to fp32 at a time on a CPU."""
_FUSED_TOLERANCE = 1e-2
"""Largest error of the update of one element, for weights in bf16."""


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

    It is torch's fused AdamW if the device has its kernel, else TensorAdamW. Moments have the dtype
    of the tensors. The engine sets each step's rate with `set_lr`.
    """
    groups = build_param_groups(optimizer, tensors)
    kwargs = build_adamw_kwargs(optimizer)
    param = groups[0]["params"][0]
    if has_fused_adamw(param.device, param.dtype):
        return torch.optim.AdamW(groups, **kwargs, fused=True)
    return TensorAdamW(groups, **kwargs)


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
            fused_adamw_(values, step, 0.5, group, torch.full_like(step, skip))
    except RuntimeError:  # NotImplementedError is one
        return False
    # Decay leaves 0.75 of the weight; the first update of AdamW has the size of the rate
    return abs(float(values[1]) - 0.25) < _FUSED_TOLERANCE


def fused_adamw_(
    values: list[Tensor], step: Tensor, lr: float, group: dict[str, Any], found_inf: Tensor | None
) -> None:
    """Update weights and moments, given gradient, weights and both moments in fp32.

    The kernel is called directly: torch.optim's wrapper costs as much as a small chunk.
    """
    gradient, param, exp_avg, exp_avg_sq = values
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [param],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next steps."""
    if isinstance(optimizer, TensorAdamW):
        optimizer.set_lr(lr)
        return
    for group in optimizer.param_groups:
        group["lr"] = lr


def step_optimizer(optimizer: Any, skip: Tensor) -> None:
    """Step the optimizer, or change nothing if the bool scalar `skip` on the device is true.

    Fused kernels and TensorAdamW evaluate `skip` on the device through torch's gradient scaler
    interface; other implementations synchronize with the host.
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
