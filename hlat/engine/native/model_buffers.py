"""Buffers of the model parts: state of modules that the optimizer does not train."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.distributed.device_mesh import ParallelMesh
from hlat.distributed.state_shard import BUFFERS, StateShard
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_buffer_specs


class ModelBuffers:
    """Buffers of this rank, the same on all its data- and tensor-parallel ranks."""

    def __init__(
        self,
        parts: Iterable[Decoder],
        model: ModelConfig,
        mesh: ParallelMesh,
        device: torch.device,
    ) -> None:
        """Allocate the buffers of the model parts with their initial values."""
        self._specs = {spec.name: spec for spec in list_buffer_specs(model)}
        self._saves = mesh.dp.rank == mesh.tp.rank == 0
        self._buffers: dict[str, Tensor] = {}
        for part in parts:
            for name, buffer in [*part.named_buffers()]:
                module, _, leaf = name.rpartition(".")
                tensor = torch.empty_like(buffer, device=device)
                setattr(part.get_submodule(module), leaf, tensor)
                self._buffers[f"model.{name}"] = tensor
        self.reset()

    def reset(self) -> None:
        """Set all buffers to their initial values."""
        for name, buffer in self._buffers.items():
            buffer.fill_(self._specs[name].initial_value)

    def iter_state_shards(self) -> Iterator[StateShard]:
        """Yield the buffers; one rank of each pipeline stage saves them."""
        for name, buffer in self._buffers.items():
            shape = self._specs[name].shape
            offset = (0,) * len(shape)
            yield StateShard(f"{BUFFERS}/{name}", shape, offset, shape, buffer, self._saves)
