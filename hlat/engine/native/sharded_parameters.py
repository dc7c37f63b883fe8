"""Parameters and optimizer state of a rank, sharded over data-parallel ranks (ZeRO)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hlat.config.run import Config
from hlat.distributed.device_mesh import ParallelMesh
from hlat.distributed.parameter_shards import ParameterShard
from hlat.engine.native.data_parallel import DataParallelSharding


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of this rank and its canonical rows and columns.

    Attributes:
        param: The parameter.
        padded_data: Its memory, with the padding rows of ZeRO-1.
        shard: Its canonical rows and columns.
        sharding: Ranks with replicas, and the rows of each.
    """

    param: nn.Parameter
    padded_data: Tensor
    shard: ParameterShard
    sharding: DataParallelSharding


class ShardedParameters:
    """Parameters of this rank by name, and the rows of each that this rank updates.

    Attributes:
        sharding: Sharding of all parameters but experts.
        updated_params: Views of the updated rows, without parameters that have no such rows.
        shards: Canonical rows and columns of each of `updated_params`.
    """

    def __init__(
        self, local_params: Mapping[str, LocalParameter], config: Config, mesh: ParallelMesh
    ) -> None:
        self.local_params = local_params
        self.model_params = {name: local.param for name, local in local_params.items()}
        zero = config.parallelism.zero
        self.sharding = DataParallelSharding(mesh.dp_shard, mesh.dp_replicate, zero)
        self.updated_rows = {
            name: local.sharding.get_updated_rows(local.shard.shape)
            for name, local in local_params.items()
        }
        self.updated_params: dict[str, Tensor] = {}
        self.shards: dict[str, ParameterShard] = {}
        for name, rows in self.updated_rows.items():
            view = local_params[name].padded_data.detach()[rows]
            if view.numel():
                self.updated_params[name] = view
                self.shards[name] = local_params[name].shard.slice_rows(rows.start, rows.stop)

    def owns(self, name: str) -> bool:
        """Return True if this data-parallel rank saves the rows and counts them in norms."""
        local = self.local_params[name]
        return local.sharding.owns_rows(local.shard.shape[0], self.updated_rows[name])

    def select_owned_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Select the rows that this rank counts in norms from tensors like `updated_params`."""
        return {
            name: tensor[: self.shards[name].num_owned_rows]
            for name, tensor in tensors.items()
            if self.owns(name) and self.shards[name].num_owned_rows
        }

    def get_state(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a parameter that checkpoints contain, by key."""
        return {"weights": self.updated_params[name]}

    @torch.no_grad()
    def sync_model_params(self) -> None:
        """Gather the rows that other data-parallel ranks updated into the model."""
        for local in self.local_params.values():
            local.sharding.all_gather_params(local.padded_data)
