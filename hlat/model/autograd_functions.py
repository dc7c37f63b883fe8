"""RMSNorm, SwiGLU, GeGLU and rotation with manual backward passes that save and compute less.

Autograd saves the inputs of each derivative: two fp32 copies for a norm in bf16, and silu(gate)
for SwiGLU. These functions save the input and recompute the rest in fewer passes over memory, which
dominate their cost on a CPU.
"""

# ruff: noqa: N812

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x_BSH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Apply root mean square normalization (arXiv 1910.07467), computed in fp32."""
    if not torch.is_grad_enabled():  # the same bits with less overhead for a single token
        return F.rms_norm(x_BSH.to(weight_H.dtype), weight_H.shape, weight_H, eps).to(x_BSH.dtype)
    y_BSH: Tensor = _RMSNorm.apply(x_BSH, weight_H, eps)  # type: ignore[no-untyped-call]
    return y_BSH


def swiglu(gate_up_BS2I: Tensor, block_size: int) -> Tensor:
    """Return silu(gate) * up of alternating blocks; [B, S, 2 I] to [B, S, I]."""
    return _apply_glu(gate_up_BS2I, block_size, F.silu, torch.ops.aten.silu_backward)


def geglu(gate_up_BS2I: Tensor, block_size: int) -> Tensor:
    """Return gelu(gate) * up of alternating blocks, with the tanh approximation of GELU."""
    return _apply_glu(gate_up_BS2I, block_size, _gelu, _gelu_backward)


def rotate(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotate elements i and i + D/2 of each head by the same angle."""
    if torch.compiler.is_compiling():  # generated kernels read halves in place
        first, second = x_BSND.chunk(2, dim=-1)
        rotated_BSND = torch.cat((-second, first), dim=-1)
        return x_BSND * cos_SD.unsqueeze(-2) + rotated_BSND * sin_SD.unsqueeze(-2)
    if not torch.is_grad_enabled():
        return _rotate_halves(x_BSND, cos_SD, sin_SD)
    y_BSND: Tensor = _Rotation.apply(x_BSND, cos_SD, sin_SD)  # type: ignore[no-untyped-call]
    return y_BSND


class _RMSNorm(torch.autograd.Function):
    """Autograd function of `rms_norm`: y = n * weight with n = x / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        fp32_BSH = x_BSH.float()
        scale_BS1 = torch.rsqrt(fp32_BSH.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x_BSH, weight_H, scale_BS1)
        n_BSH, fp32_H = fp32_BSH * scale_BS1, weight_H.float()
        # torch 2.11 compiles a gradient of zero if the last operation returns its input, such as
        # an in-place operation or a cast to the same dtype
        y_BSH = n_BSH * fp32_H if torch.compiler.is_compiling() else n_BSH.mul_(fp32_H)
        return y_BSH if y_BSH.dtype == x_BSH.dtype else y_BSH.to(x_BSH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor | None, ...]:
        """With g = grad * weight: dx = (g - n * mean(g * n)) / rms(x), dweight = sum(grad * n)."""
        x_BSH, weight_H, scale_BS1 = ctx.saved_tensors
        n_BSH, fp32_H, grad_BSH = x_BSH * scale_BS1, weight_H.float(), grad_BSH.float()
        product_BSH = grad_BSH * n_BSH
        mean_BS1 = (product_BSH @ fp32_H).unsqueeze(-1) / len(fp32_H)
        grad_x_BSH = (grad_BSH * fp32_H).sub_(n_BSH.mul_(mean_BS1)).mul_(scale_BS1)
        grad_H = product_BSH.flatten(0, -2).sum(0)
        return grad_x_BSH.to(x_BSH.dtype), grad_H.to(weight_H.dtype), None


class _Rotation(torch.autograd.Function):
    """Autograd function of `rotate`; its backward pass rotates by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SD, sin_SD)
        return _rotate_halves(x_BSND, cos_SD, sin_SD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSND: Tensor) -> tuple[Tensor | None, ...]:
        cos_SD, sin_SD = ctx.saved_tensors
        return _rotate_halves(grad_BSND, cos_SD, -sin_SD), None, None


class _GatedLinearUnit(torch.autograd.Function):
    """Autograd function of `swiglu` and `geglu`."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_up_BS2I: Tensor,
        block_size: int,
        activation: Callable[[Tensor], Tensor],
        activation_backward: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(gate_up_BS2I)
        ctx.block_size = block_size
        ctx.activation, ctx.activation_backward = activation, activation_backward
        return _compute_glu(gate_up_BS2I, block_size, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSI: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_BS2I,) = ctx.saved_tensors
        gate, up = _split_gate_up(gate_up_BS2I, ctx.block_size)
        grad = torch.unflatten(grad_BSI, -1, (-1, ctx.block_size))
        grad_gate = ctx.activation_backward(grad * up, gate)
        grad_up = ctx.activation(gate).mul_(grad)
        return torch.stack((grad_gate, grad_up), -2).flatten(-3), None, None, None


def _rotate_halves(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Return x * cos plus swapped halves * sin, negative for the first half."""
    half = x_BSND.shape[-1] // 2
    swapped_BSND = torch.cat((x_BSND[..., half:], x_BSND[..., :half]), dim=-1)
    signed_SD = torch.cat((-sin_SD[..., :half], sin_SD[..., half:]), dim=-1)
    swapped_BSND *= signed_SD.unsqueeze(-2)
    return (x_BSND * cos_SD.unsqueeze(-2)).add_(swapped_BSND)


def _apply_glu(
    gate_up_BS2I: Tensor,
    block_size: int,
    activation: Callable[[Tensor], Tensor],
    activation_backward: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    if not torch.is_grad_enabled():  # avoids the overhead of a Function for a single token
        return _compute_glu(gate_up_BS2I, block_size, activation)
    y_BSI: Tensor = _GatedLinearUnit.apply(  # type: ignore[no-untyped-call]
        gate_up_BS2I, block_size, activation, activation_backward
    )
    return y_BSI


def _compute_glu(
    gate_up_BS2I: Tensor, block_size: int, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    gate, up = _split_gate_up(gate_up_BS2I, block_size)
    return activation(gate).mul_(up).flatten(-2)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    grad_x: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return grad_x


def _split_gate_up(gate_up_BS2I: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return gate and up; copy the gate, since silu of short blocks takes 2.5 times as long.

    Under torch.compile the gate is not copied: generated kernels read blocks in place, and would
    save the copy.
    """
    gate, up = torch.unflatten(gate_up_BS2I, -1, (-1, 2, block_size)).unbind(-2)
    return (gate if torch.compiler.is_compiling() else gate.contiguous()), up
