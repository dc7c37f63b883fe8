"""A copy of the state in host memory, which is written while training changes the state itself."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from hlat.checkpoint.chunk import Chunk


class Staging:
    """Memory for one copy of what this process saves; each save takes it again.

    New memory must be paged in, which takes several times as long as the copy.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def prepare(self, chunks: Iterable[Chunk]) -> None:
        """Page in the memory for the chunks that are `saved`; meant for a thread of its own."""
        for chunk in chunks:
            if chunk.saved:
                # NumPy stays in this thread, where torch would start a second pool of its own
                self._take(chunk).reshape(-1).view(torch.uint8).numpy().fill(0)

    @torch.no_grad()
    def copy(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Copy the chunks that are `saved`; the copies are good until the next call."""
        return [
            replace(chunk, tensor=self._take(chunk).copy_(chunk.tensor))
            for chunk in chunks
            if chunk.saved
        ]

    def _take(self, chunk: Chunk) -> torch.Tensor:
        key, values = (chunk.name, chunk.offset), chunk.tensor
        if key not in self._memory:
            self._memory[key] = torch.empty(values.shape, dtype=values.dtype)
        return self._memory[key]
