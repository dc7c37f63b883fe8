"""Two operators of a layer whose backward pass is written out: it keeps less and does less.

Left to autograd, each operation of a formula keeps what its own derivative reads: of a norm in bf16
two copies in fp32, of a product with silu also the silu. Here the input is kept and the rest made
again, in fewer passes over memory, which is what these operators cost on a CPU.
"""

# ruff: noqa: N812  F is what the field calls it.

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x_BSH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Root mean square normalization (arXiv 1910.07467), computed in fp32 whatever the dtype."""
    if not torch.is_grad_enabled():  # the same bits, with less around them for a single token
        return F.rms_norm(x_BSH, weight_H.shape, weight_H, eps)
    y_BSH: Tensor = _RMSNorm.apply(x_BSH, weight_H, eps)  # type: ignore[no-untyped-call]
    return y_BSH


def swiglu(blocks_BS2I: Tensor, block: int) -> Tensor:
    """silu(gate) * up of alternating blocks; [B, S, 2 I] to [B, S, I]."""
    if not torch.is_grad_enabled():  # for a single token a Function costs as much as the product
        return _gated(blocks_BS2I, block)
    y_BSI: Tensor = _SwiGLU.apply(blocks_BS2I, block)  # type: ignore[no-untyped-call]
    return y_BSI


class _RMSNorm(torch.autograd.Function):
    """`rms_norm`: y = n * weight with n = x / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide_BSH = x_BSH.float()
        scale_BS1 = torch.rsqrt(wide_BSH.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x_BSH, weight_H, scale_BS1)
        return (wide_BSH * scale_BS1).mul_(weight_H.float()).to(x_BSH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor | None, ...]:
        """With g = grad * weight: dx = (g - n * mean(g * n)) / rms(x), dweight = sum(grad * n)."""
        x_BSH, weight_H, scale_BS1 = ctx.saved_tensors
        n_BSH, wide_H = x_BSH * scale_BS1, weight_H.float()
        product_BSH = grad_BSH * n_BSH
        mean_BS1 = (product_BSH @ wide_H).unsqueeze(-1) / len(wide_H)
        grad_x_BSH = (grad_BSH * wide_H).sub_(n_BSH.mul_(mean_BS1)).mul_(scale_BS1)
        grad_H = product_BSH.flatten(0, -2).sum(0)
        return grad_x_BSH.to(x_BSH.dtype), grad_H.to(weight_H.dtype), None


class _SwiGLU(torch.autograd.Function):
    """`swiglu`."""

    @staticmethod
    def forward(ctx: Any, blocks_BS2I: Tensor, block: int) -> Tensor:
        ctx.save_for_backward(blocks_BS2I)
        ctx.block = block
        return _gated(blocks_BS2I, block)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSI: Tensor) -> tuple[Tensor | None, ...]:
        (blocks_BS2I,) = ctx.saved_tensors
        gate, up = _gate_and_up(blocks_BS2I, ctx.block)
        grad = torch.unflatten(grad_BSI, -1, (-1, ctx.block))
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.stack((grad_gate, F.silu(gate).mul_(grad)), -2).flatten(-3), None


def _gated(blocks_BS2I: Tensor, block: int) -> Tensor:
    gate, up = _gate_and_up(blocks_BS2I, block)
    return F.silu(gate).mul_(up).flatten(-2)


def _gate_and_up(blocks_BS2I: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Gates are copied out, since from short blocks silu takes 2.5 times as long.

    Not for a compiler, which reads them where they are, and would keep the copy.
    """
    gate, up = torch.unflatten(blocks_BS2I, -1, (-1, 2, block)).unbind(-2)
    return (gate if torch.compiler.is_compiling() else gate.contiguous()), up
