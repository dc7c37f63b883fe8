"""Object groups composed of mesh axes, so that a rank's cost does not grow with the world size."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hlat.distributed.mesh_axis import MeshAxis
from hlat.distributed.object_group import ObjectGroup
from hlat.distributed.parallel_state import ParallelState
from hlat.distributed.process_groups import Partition

_WORLD_AXES = ("pp", "dp", "tp")
"""Axes that span all ranks; the last one varies fastest in the rank order."""


class MeshObjectGroup(ObjectGroup):
    """All ranks spanned by some axes; the last axis varies fastest in the rank order."""

    def __init__(self, axes: list[MeshAxis]) -> None:
        self._axes = axes
        self.rank, self.size = 0, math.prod(axis.size for axis in axes)
        for axis in axes:
            self.rank = self.rank * axis.size + axis.rank

    def broadcast(self, message: bytes | None) -> bytes:
        """Broadcast along the first axis, then along the next."""
        for i, axis in enumerate(self._axes):
            if all(later.rank == 0 for later in self._axes[i + 1 :]):
                message = axis.broadcast(message if axis.rank == 0 else None)
        assert message is not None
        return message

    def reduce_object(self, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
        """Merge along the last axis, then from its first ranks along the axis before it."""
        for i, axis in reversed([*enumerate(self._axes)]):
            if axis.size > 1 and all(later.rank == 0 for later in self._axes[i + 1 :]):
                messages = axis.all_gather_object(json.dumps(value).encode())
                value = merge([*map(json.loads, messages)]) if axis.rank == 0 else None
        return value if self.is_rank0 else None

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank."""
        for axis in self._axes:
            flag = axis.any(flag)
        return flag


def add_background_axes(partitions: Mapping[str, Partition]) -> dict[str, Partition]:
    """Add the axes of a background thread, which must not share a group with another thread."""
    background = {f"background_{name}": partitions[name] for name in _WORLD_AXES}
    return {**partitions, **background}


def build_parallel_state(rank: int, axes: Mapping[str, MeshAxis]) -> ParallelState:
    """Return the parallel state of a rank, given its mesh axes with their background axes."""
    pp, dp, tp = (axes[name] for name in _WORLD_AXES)
    parallel = ParallelState(
        rank=rank,
        dp_rank=dp.rank,
        dp_size=dp.size,
        model_parallel_group=MeshObjectGroup([pp, tp]) if pp.size * tp.size > 1 else None,
    )
    if pp.size * dp.size * tp.size == 1:
        return parallel
    return replace(
        parallel,
        world_group=MeshObjectGroup([pp, dp, tp]),
        background_group=MeshObjectGroup([axes[f"background_{name}"] for name in _WORLD_AXES]),
    )
