"""Device mesh of a run (init_device_mesh in torch), and initialization of torch.distributed.

A rank creates only the process groups that it belongs to, and collectives over all ranks run axis
by axis, so that a rank's start-up cost does not grow with the world size.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hlat.config.run import Config
from hlat.distributed.mesh_axis import MeshAxis
from hlat.distributed.mesh_coordinates import (
    ParallelDegrees,
    compute_parallel_degrees,
    partition_ranks,
    split_into_groups,
)
from hlat.distributed.mesh_object_group import add_background_axes, build_parallel_state
from hlat.distributed.parameter_shards import count_kv_replicas
from hlat.distributed.process_groups import Partition, create_axes
from hlat.distributed.rank_environment import build_rendezvous_environment
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import get_optimizer_spec

_LAZY_GLOO_ENV = "TORCH_GLOO_LAZY_INIT"


class ParallelMesh:
    """Mesh axes through one rank.

    Attributes:
        dp: Ranks with the same part of the model and other sequences.
        tp: Ranks with the same layers and sequences and other rows or columns.
        pp: Ranks with other layers.
        kv: Tensor-parallel ranks with the same key/value head.
        tied_embedding: First and last pipeline rank, if the output head is the embedding and this
            rank has it.
        stage: All ranks of a pipeline stage, if the optimizer updates whole matrices.
        ep: Consecutive data-parallel ranks with other experts.
        dp_shard: Consecutive data-parallel ranks over which ZeRO shards a replica.
        dp_replicate: Data-parallel ranks with the same shards.
        expert_dp_shard: Ranks along dp_shard with the same experts.
    """

    def __init__(self, config: Config, rank: int = 0) -> None:
        degrees = compute_parallel_degrees(config.parallelism, config.num_processes)
        self.world_size = degrees.world_size
        self.sequence_parallel = config.parallelism.sequence_parallel
        axes = create_axes(list_axis_partitions(config, degrees), rank)
        self.tp, self.dp, self.pp = axes["tp"], axes["dp"], axes["pp"]
        self.kv = axes.get("kv", self.tp)
        tied = axes.get("tied_embedding")
        self.tied_embedding = tied if tied is not None and tied.size > 1 else None
        self.stage = axes.get("stage")
        self.ep = axes.get("ep", MeshAxis([rank], rank))
        self.dp_shard = axes.get("dp_shard", self.dp)
        self.dp_replicate = axes.get("dp_replicate", MeshAxis([rank], rank))
        self.expert_dp_shard = axes.get("expert_dp_shard", self.dp_shard)
        self.parallel_state = build_parallel_state(rank, axes)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks in place."""
        for axis in (self.tp, self.dp, self.pp):
            axis.all_reduce(tensor)


def list_axis_partitions(config: Config, degrees: ParallelDegrees) -> dict[str, Partition]:
    """Return the ranks along each axis of the mesh, by name, in the order of creation."""
    tp, dp, pp = (partition_ranks(degrees, axis) for axis in ("tp", "dp", "pp"))
    partitions: dict[str, Partition] = {"tp": tp, "dp": dp, "pp": pp}
    size = count_kv_replicas(config.model, degrees.tp)
    if size < degrees.tp:
        starts = range(0, degrees.tp, size)
        partitions["kv"] = [ranks[start : start + size] for ranks in tp for start in starts]
    if config.model.tie_embeddings and degrees.pp > 1:
        ends = [[ranks[0], ranks[-1]] for ranks in pp]
        partitions["tied_embedding"] = ends + [[rank] for ranks in pp for rank in ranks[1:-1]]
    dp_shard = dp
    if degrees.dp_replicate > 1:
        dp_shard, dp_replicate = split_into_groups(dp, degrees.dp_shard)
        partitions |= {"dp_shard": dp_shard, "dp_replicate": dp_replicate}
    if degrees.ep > 1:
        ep, expert_dp_shard = split_into_groups(dp_shard, degrees.ep)
        partitions |= {"ep": ep, "expert_dp_shard": expert_dp_shard}
    optimizer = get_optimizer_spec(config.optimizer.name)
    if not all(optimizer.is_elementwise(role) for role in ParameterRole):
        size = degrees.dp * degrees.tp
        ranks = range(degrees.world_size)
        partitions["stage"] = [ranks[start : start + size] for start in ranks[::size]]
    return add_background_axes(partitions)


def init_distributed(rank: int, world_size: int, device: torch.device) -> bool:
    """Initialize torch.distributed with the backend of the device and gloo for the host.

    The rendezvous uses MASTER_ADDR and MASTER_PORT, or Slurm's variables. Return False for a single
    process, or if torch.distributed is initialized already.
    """
    if world_size == 1 or dist.is_initialized():
        return False
    os.environ.update(build_rendezvous_environment())
    backend = dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{backend}"
    store, _, _ = next(dist.rendezvous("env://", rank, world_size))  # type: ignore[attr-defined]
    # TorchElastic reuses one store across restarts; it contains addresses of terminated ranks
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    with _lazy_gloo_connections():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return True


@contextmanager
def _lazy_gloo_connections() -> Iterator[None]:
    """Make gloo connect two ranks when they first communicate.

    Gloo otherwise connects all pairs. The group of all ranks only names the ranks of the axes, and
    no collective uses it. The axes connect at once, because a lazy connection to a rank that has
    just ended can wait for ever (pytorch/gloo issue 520).
    """
    previous = os.environ.get(_LAZY_GLOO_ENV)
    os.environ[_LAZY_GLOO_ENV] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_LAZY_GLOO_ENV]
        else:
            os.environ[_LAZY_GLOO_ENV] = previous
