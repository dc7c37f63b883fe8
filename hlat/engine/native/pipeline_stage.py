"""Pipeline stage of torch with receive buffers that exist only while a schedule uses them.

torch's stages own one buffer for the input and one for the gradient of each micro batch of a step.
With hundreds of micro batches these buffers need more memory than all other activations.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage


class TransientBufferStage(PipelineStage):
    """Stage that allocates a buffer when a receive starts and releases it after its use."""

    def __init__(
        self, module: nn.Module, index: int, num_stages: int, activation: Tensor, **options: Any
    ) -> None:
        """Create the stage.

        Args:
            module: Layers of the stage.
            index: Index of the stage.
            num_stages: Number of stages of all ranks.
            activation: Tensor on the meta device like those between stages.
            options: Other arguments of PipelineStage.
        """
        inputs = () if index == 0 else (activation,)
        super().__init__(
            module, index, num_stages, input_args=inputs, output_args=(activation,), **options
        )
        self._activation = activation

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the input of a micro batch, into a new buffer."""
        if fwd_chunk_id == 0:  # torch allocates all buffers before the first micro batch
            for chunk in range(self.chunks or 0):
                self._release_input(chunk)
                self._release_gradient(chunk)
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradient of a micro batch, into a new buffer."""
        if not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Run the forward pass of a micro batch, and keep its input for the backward pass only."""
        output = super().forward_one_chunk(fwd_chunk_id, *arguments, **options)
        self._release_input(fwd_chunk_id)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, *arguments: Any, **options: Any
    ) -> None:
        """Run the backward pass of a micro batch."""
        super().backward_one_chunk(bwd_chunk_id, loss, *arguments, **options)
        self._release_gradient(bwd_chunk_id)
        if loss is not None and options.get("full_backward", True):
            loss.detach_()  # the schedule keeps losses, and their graphs keep the inputs

    def _allocate(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            info.buffer = torch.empty_like(self._activation, device=self.device)

    def _release_input(self, chunk: int) -> None:
        for info in () if self.is_first else self.args_recv_info[chunk]:
            info.buffer = _EMPTY

    def _release_gradient(self, chunk: int) -> None:
        for info in () if self.is_last else self.grad_recv_info[chunk]:
            info.buffer = _EMPTY


_EMPTY = torch.empty(0)
"""Tensor in place of a buffer, since torch clears the gradients of all buffers after a step."""
