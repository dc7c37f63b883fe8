"""Creation of process groups: the only module that calls torch.distributed.new_group.

Only the members of a group create it, so that the start-up cost of a rank does not grow with the
world size. torch then names the group after its ranks and the number of groups that the process has
created before. Ranks with different numbers wait for each other without end. Groups are therefore
created from partitions of all ranks, and a rank without peers in a partition creates a group of
itself.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hlat.distributed.mesh_axis import MeshAxis

Partition = Sequence[Sequence[int]]
"""Groups of global ranks, in order; each rank is in one of them."""

_JOIN_TIMEOUT_S = 600.0
"""Time for all members to join a group. Ranks that start together differ by the import of libraries
and by nccom-test, which is limited to a minute; nothing is compiled before."""


def create_axes(
    partitions: Mapping[str, Partition], rank: int, backend: str | None = None
) -> dict[str, MeshAxis]:
    """Create the groups of this rank in the order of `partitions`.

    All ranks call it with the same partitions. A partition without peers creates no group.

    Args:
        partitions: Partitions by the name of the axis.
        rank: Global rank of this process.
        backend: Backend of the groups; None: the default.

    Raises:
        RuntimeError: A member did not join a group in time.
    """
    axes = {}
    for name, partition in partitions.items():
        ranks = next(ranks for ranks in partition if rank in ranks)
        group = None
        if any(len(ranks) > 1 for ranks in partition):
            group = _create_group(name, ranks, rank, backend)
        axes[name] = MeshAxis(ranks, rank, group)
    return axes


def _create_group(name: str, ranks: Sequence[int], rank: int, backend: str | None) -> Any:
    _wait_for_members(name, ranks, rank)
    # torch_xla replaces torch.distributed.new_group
    return dist.distributed_c10d.new_group(
        list(ranks), backend=backend, use_local_synchronization=True
    )


def _wait_for_members(name: str, ranks: Sequence[int], rank: int) -> None:
    """Wait until all members create the group, which new_group does without a short timeout."""
    store = dist.distributed_c10d._get_default_store()
    prefix = f"hlat/{len(dist.distributed_c10d._world.pg_names)}/{name}"
    store.set(f"{prefix}/{rank}", "")
    keys = {member: f"{prefix}/{member}" for member in ranks}
    try:
        store.wait([*keys.values()], timedelta(seconds=_JOIN_TIMEOUT_S))
    except dist.DistStoreError as error:
        missing = [str(member) for member, key in keys.items() if not store.check([key])]
        raise RuntimeError(
            f"rank {rank} waited {_JOIN_TIMEOUT_S:g} s in the creation of process group {name!r}; "
            f"missing ranks: {', '.join(missing)}. They have stopped, or create another group"
        ) from error
