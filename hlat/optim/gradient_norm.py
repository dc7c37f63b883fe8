"""Global norm of gradients without host synchronization."""

from collections.abc import Iterable

import torch
from torch import Tensor

_FP32_CHUNK_NUMEL = 1 << 19
"""Elements cast to fp32 at a time on a CPU; each cast wakes the threads."""


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

    A CPU casts a copy to fp32: some rows at a time bound its memory.
    """
    l2 = torch.linalg.vector_norm
    if tensor.is_cpu and tensor.dim() > 1 and tensor.dtype != torch.float32:
        chunks = torch.split(tensor, max(1, _FP32_CHUNK_NUMEL // tensor.shape[-1]))
        return torch.cat([l2(chunk, dim=-1, dtype=torch.float32) for chunk in chunks])
    norms: Tensor = l2(tensor, dim=-1, dtype=torch.float32)
    return norms
