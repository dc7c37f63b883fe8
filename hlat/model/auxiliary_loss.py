"""Losses of modules inside of the decoder, which gradients contain and logged losses do not."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class AuxiliaryLoss(nn.Module):
    """Loss of a module, attached to one of its outputs.

    The backward pass adds the gradient of the loss once, also if activation checkpointing
    recomputes the forward pass. Without a factor, and without gradients, there is no loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.0
        """Factor of the loss of a sequence in the objective."""

    @property
    def is_active(self) -> bool:
        """True if the loss must be computed."""
        return self.factor > 0 and torch.is_grad_enabled()

    def forward(self, output: Tensor, loss: Tensor) -> Tensor:
        """Return `output`, whose backward pass adds the gradient of a scalar loss."""
        result: Tensor = _AddGradient.apply(  # type: ignore[no-untyped-call]
            output, loss, self.factor
        )
        return result


class _AddGradient(torch.autograd.Function):
    """Identity of an output, with the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.gradient = torch.full_like(loss, factor)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.gradient, None


def set_loss_factor(models: Iterable[nn.Module], factor: float) -> None:
    """Set the factor of all auxiliary losses for the next step."""
    for model in models:
        for module in model.modules():
            if isinstance(module, AuxiliaryLoss):
                module.factor = factor
