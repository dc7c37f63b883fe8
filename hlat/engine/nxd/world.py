"""All ranks of a run as NxD numbers them, and the groups over host memory in which they agree.

What a run says between its steps is no business of the device: a collective there would be one
more graph to compile. NxD's numbers follow from the hardware: on trn1 four tensor-parallel ranks
are eight devices apart.
"""

from typing import Any

import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state

from hlat.engine.axis import Axis
from hlat.engine.interface import World
from hlat.engine.ranks import Ranks
from hlat.parallelism.group import Alone


def host_axes() -> dict[str, Axis]:
    """The axes of this process, by name: pp, dp and tp."""
    number = dist.get_rank()
    return {name: Axis(ranks, number, "gloo") for name, (ranks, _) in groups().items()}


def device_axes() -> dict[str, Axis]:
    """The same over what connects the devices, in NxD's own groups."""
    number = dist.get_rank()
    return {name: Axis(ranks, number, group=group) for name, (ranks, group) in groups().items()}


def groups() -> dict[str, tuple[list[int], Any]]:
    """This process's ranks along each axis, in the order of their places, and NxD's group."""
    names = {"pp": "pipeline_model_parallel", "dp": "data_parallel", "tp": "tensor_model_parallel"}
    number, found = dist.get_rank(), {}
    for axis, name in names.items():
        replicas = getattr(parallel_state, f"get_{name}_replica_groups")()
        ranks = next(sorted(ranks) for ranks in replicas if number in ranks)  # as torch has them
        found[axis] = ranks, getattr(parallel_state, f"get_{name}_group")()
    return found


def world_of(axes: dict[str, Axis]) -> World:
    """What the story of a run asks."""
    every = [axes[name] for name in ("pp", "dp", "tp")]
    alone = all(axis.size == 1 for axis in every)
    replica = [axes["pp"], axes["tp"]]
    return World(
        rank=dist.get_rank(),
        dp_rank=axes["dp"].rank,
        dp_size=axes["dp"].size,
        peers=None if all(axis.size == 1 for axis in replica) else Ranks(replica),
        everyone=Alone() if alone else Ranks(every),
        background=Alone() if alone else Ranks([axis.again() for axis in every]),
    )
