"""All ranks of a run as NxD numbers them, and the groups over host memory in which they agree.

What a run says between its steps is no business of the device: a collective there would be one
more graph to compile.
"""

from dataclasses import replace

import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state

from hlat.config.run import Config
from hlat.engine.axis import Axis
from hlat.engine.interface import World
from hlat.engine.ranks import Ranks
from hlat.parallelism.group import Alone
from hlat.parallelism.mesh import coordinates, degrees, rank


def host_axes(config: Config) -> dict[str, Axis]:
    """The axes of this process, by name: pp, dp and tp."""
    shape, number = degrees(config.parallelism, config.num_processes), dist.get_rank()
    place = coordinates(number, shape)
    found = place.pp, place.dp, place.tp
    assert found == (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    ), "NxD numbers ranks otherwise"
    return {
        name: Axis([rank(replace(place, **{name: i}), shape) for i in range(size)], number, "gloo")
        for name, size in (("pp", shape.pp), ("dp", shape.dp), ("tp", shape.tp))
    }


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
