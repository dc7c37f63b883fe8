"""Copy of the state in host memory, which is written to disk while training continues."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from hlat.checkpoint.tensor_chunk import TensorChunk


class HostStagingBuffer:
    """Host memory for one copy of the chunks that this process saves, reused by every save.

    Paging in new memory takes several times as long as the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def allocate(self, chunks: Iterable[TensorChunk]) -> None:
        """Page in memory for the chunks that this process saves; meant for a separate thread."""
        for chunk in chunks:
            if chunk.is_main_replica:
                # NumPy does not start a thread pool for this thread, as torch does
                self._get_buffer(chunk).reshape(-1).view(torch.uint8).numpy().fill(0)

    @torch.no_grad()
    def copy_chunks(self, chunks: Iterable[TensorChunk]) -> list[TensorChunk]:
        """Return copies of the chunks that this process saves, valid until the next call."""
        return [
            replace(chunk, tensor=self._get_buffer(chunk).copy_(chunk.tensor))
            for chunk in chunks
            if chunk.is_main_replica
        ]

    def _get_buffer(self, chunk: TensorChunk) -> torch.Tensor:
        key, tensor = (chunk.name, chunk.offset), chunk.tensor
        if key not in self._buffers:
            self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._buffers[key]
