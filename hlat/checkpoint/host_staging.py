"""Copy of the state in host memory, which is written to disk while training continues."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from hlat.distributed.state_shard import StateShard


class HostStagingBuffer:
    """Host memory for one copy of the shards that this process saves, reused by every save.

    Paging in new memory takes several times as long as the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def allocate(self, shards: Iterable[StateShard]) -> None:
        """Page in memory for the shards that this process saves; meant for a separate thread."""
        for shard in shards:
            if shard.is_main_replica:
                # NumPy does not start a thread pool for this thread, as torch does
                self._get_buffer(shard).reshape(-1).view(torch.uint8).numpy().fill(0)

    @torch.no_grad()
    def copy_state_shards(self, shards: Iterable[StateShard]) -> list[StateShard]:
        """Return copies of the shards that this process saves, valid until the next call."""
        return [
            replace(shard, tensor=self._get_buffer(shard).copy_(shard.tensor))
            for shard in shards
            if shard.is_main_replica
        ]

    def _get_buffer(self, shard: StateShard) -> torch.Tensor:
        key, tensor = (shard.name, shard.offset), shard.tensor
        if key not in self._buffers:
            self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._buffers[key]
