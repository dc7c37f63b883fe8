"""Rank arithmetic of the device mesh with the axes data, tensor and pipeline.

It needs no process group, so that planner and launchers can use it before a process exists, and it
is shared by all engines.
"""

from dataclasses import dataclass
from itertools import product

from hlat.config.parallelism import ParallelismConfig


@dataclass(frozen=True)
class ParallelDegrees:
    """Number of processes along each axis.

    Of those along dp, `ep` consecutive ones divide experts, and `dp_shard` consecutive ones shard
    the state of a replica.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_replicate: int = 1

    @property
    def world_size(self) -> int:
        """Product of dp, tp and pp."""
        return self.dp * self.tp * self.pp

    @property
    def dp_shard(self) -> int:
        """Data-parallel ranks of a replica."""
        return self.dp // self.dp_replicate


@dataclass(frozen=True)
class MeshCoordinates:
    """Index of one process along each axis."""

    dp: int = 0
    tp: int = 0
    pp: int = 0


def compute_parallel_degrees(parallelism: ParallelismConfig, world_size: int) -> ParallelDegrees:
    """Return the validated degrees of a run; dp follows from `world_size` where it is null."""
    dp, remainder = divmod(world_size, parallelism.tp * parallelism.pp)
    assert remainder == 0
    assert parallelism.dp in (None, dp)
    layout = parallelism
    return ParallelDegrees(dp, layout.tp, layout.pp, layout.ep, layout.dp_replicate)


def compute_mesh_coordinates(rank: int, degrees: ParallelDegrees) -> MeshCoordinates:
    """Return the coordinates of a global rank: tp varies fastest, then dp, then pp.

    The order [pp, dp, tp] is neuronx-distributed's (parallel_state.initialize_model_parallel):
    tensor-parallel ranks, which communicate most, are adjacent on one node, and pipeline stages,
    which communicate least, have the largest distance.
    """
    rest, tp = divmod(rank, degrees.tp)
    pp, dp = divmod(rest, degrees.dp)
    return MeshCoordinates(dp, tp, pp)


def partition_ranks(degrees: ParallelDegrees, axis: str) -> list[list[int]]:
    """Return the groups of global ranks that differ only in their index along an axis."""
    strides = {"pp": degrees.dp * degrees.tp, "dp": degrees.tp, "tp": 1}
    offsets = {
        name: range(0, getattr(degrees, name) * stride, stride) for name, stride in strides.items()
    }
    along = offsets.pop(axis)
    return [[sum(others) + offset for offset in along] for others in product(*offsets.values())]


def split_into_groups(axis: list[list[int]], size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Split the ranks along an axis into groups of `size` consecutive ranks.

    Returns:
        The groups, and the ranks with the same index in each group.
    """
    groups = [ranks[i : i + size] for ranks in axis for i in range(0, len(ranks), size)]
    return groups, [ranks[i::size] for ranks in axis for i in range(size)]
