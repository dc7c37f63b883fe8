"""Gradient norms and RMSNorm of NxD."""

from typing import Any

import torch
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.modules.rms_norm import RMSNorm
from neuronx_distributed.parallel_layers import grads, parallel_state, utils
from neuronx_distributed.utils import get_device
from torch import Tensor

from tests.nxd.on_ranks.start import host, on_device, start

HEAD, HIDDEN = 2, 4


def of_qkv(num_heads: int, num_kv_heads: int, multiplier: int, fused: bool) -> tuple[float, float]:
    """Return NxD's norm of gradients of one, with its and with corrected parameter attributes."""
    rank = start()
    layer = on_device(
        GQAQKVColumnParallelLinear(
            HIDDEN,
            [num_heads * HEAD, num_kv_heads * HEAD],
            bias=False,
            gather_output=False,
            kv_size_multiplier=multiplier,
            fuse_qkv=fused,
        )
    )
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = grads.get_grad_norm(list(layer.parameters())).item()
    if fused:
        size = parallel_state.get_tensor_model_parallel_size()
        utils.set_tensor_model_parallel_attributes(layer.weight_qkv, True, 0, 1, size)
    else:
        groups = parallel_state.get_kv_shared_replica_groups()
        first = any(rank == group[0] for group in groups)
        layer.weight_k.shared = layer.weight_v.shared = not first
    return before, grads.get_grad_norm(list(layer.parameters())).item()


def rms(x: Tensor) -> dict[str, Any]:
    """Return RMSNorm by NxD, and with a mean square in torch.double (fp32 on the device)."""
    start()
    x_device = x.to(get_device())
    by_nxd = on_device(RMSNorm(x.shape[-1], eps=0.0))(x_device)
    x_double = x_device.double()
    mean_square = x_double.pow(2).mean(-1, keepdim=True)
    by_hand = (x_double * torch.rsqrt(mean_square)).float()
    return dict(zip(("nxd", "double"), host(by_nxd, by_hand), strict=True))
