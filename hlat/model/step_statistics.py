"""Statistics of modules inside of the decoder over a training step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class StepStatistics(nn.Module):
    """Counts and sums of a module over the micro batches of a training step.

    The backward pass adds them once per micro batch, also if activation checkpointing recomputes
    the forward pass. Nothing is added before `start_step`, or without gradients.

    Attributes:
        counts: int64, [num_counts]; None before the first step.
        sums: fp32, [num_sums]; None before the first step.
        update_buffers: Function that updates buffers of the module after a step, given the counts
            of the global batch and a bool scalar; if that is true, buffers stay bit-identical. None
            without such buffers.
    """

    def __init__(
        self,
        num_counts: int,
        num_sums: int,
        update_buffers: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._num_counts, self._num_sums = num_counts, num_sums
        self.update_buffers = update_buffers
        self.counts: Tensor | None = None
        self.sums: Tensor | None = None

    @property
    def is_active(self) -> bool:
        """True if the statistics must be computed."""
        return self.counts is not None and torch.is_grad_enabled()

    def start_step(self, device: torch.device) -> None:
        """Start the next step with zeros."""
        self.counts = torch.zeros(self._num_counts, dtype=torch.int64, device=device)
        self.sums = torch.zeros(self._num_sums, dtype=torch.float32, device=device)

    def forward(self, output: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
        """Return `output`; its backward pass adds counts and sums to those of the step."""
        result: Tensor = _AddStatistics.apply(  # type: ignore[no-untyped-call]
            output, self, counts, sums
        )
        return result


class _AddStatistics(torch.autograd.Function):
    """Identity of an output; the backward pass adds statistics."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, statistics: StepStatistics, counts: Tensor, sums: Tensor
    ) -> Tensor:
        ctx.statistics, ctx.counts, ctx.sums = statistics, counts, sums
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.statistics.counts += ctx.counts
        ctx.statistics.sums += ctx.sums
        return gradient, None, None, None
