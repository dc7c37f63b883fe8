"""All ranks of a run on the native engine: their places, their axes, and what they agree on.

Groups are made once, each rank only those that it belongs to, and what all must know travels axis
by axis: so what starting costs a rank does not grow with the world.
"""

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from hlat.config.run import Config
from hlat.engine.axis import Axis
from hlat.engine.interface import World
from hlat.engine.processes import rendezvous
from hlat.engine.ranks import Ranks
from hlat.engine.shards import kv_copies
from hlat.parallelism.group import Alone
from hlat.parallelism.mesh import coordinates, degrees, rank


class Mesh:
    """The axes of this process.

    Attributes:
        dp: Ranks with the same part of the model and other sequences.
        tp: Ranks with the same layers and sequences, and other rows or columns.
        pp: Ranks with other layers.
        kv: Of the tensor-parallel ranks, those that hold the same key/value head.
        sequence_parallel: Whether tensor-parallel ranks share the tokens between regions.
    """

    def __init__(self, config: Config, number: int = 0) -> None:
        """Make the groups of a process; `number` is its rank in the world that there is."""
        shape = degrees(config.parallelism, config.num_processes)
        self.place = place = coordinates(number, shape)
        self.number, self.size = number, shape.num_processes
        self.sequence_parallel = config.parallelism.sequence_parallel

        def axis(name: str, members: range) -> Axis:
            return Axis([rank(replace(place, **{name: i}), shape) for i in members], number)

        self.tp = axis("tp", range(shape.tp))
        self.dp = axis("dp", range(shape.dp))
        self.pp = axis("pp", range(shape.pp))
        copies = kv_copies(config.model, shape.tp)
        first = place.tp // copies * copies
        self.kv = self.tp if copies == shape.tp else axis("tp", range(first, first + copies))
        self._background = [axis.again() for axis in (self.pp, self.dp, self.tp)]

    @property
    def world(self) -> World:
        """What the story of a run asks."""
        alone = self.size == 1
        replica = [self.pp, self.tp]
        return World(
            rank=self.number,
            dp_rank=self.dp.rank,
            dp_size=self.dp.size,
            peers=None if self.pp.size * self.tp.size == 1 else Ranks(replica),
            everyone=Alone() if alone else Ranks([self.pp, self.dp, self.tp]),
            background=Alone() if alone else Ranks(self._background),
        )

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add up over all ranks, in place."""
        for axis in (self.tp, self.dp, self.pp):
            axis.sum_(tensor)


def join_world(number: int, size: int, device: torch.device) -> bool:
    """Meet all other processes of the run, with the backend of the device and one for the host.

    MASTER_ADDR and MASTER_PORT say where, or Slurm's own variables.

    Returns:
        Whether there was anybody to meet, and nobody has yet.
    """
    if size == 1 or dist.is_initialized():
        return False
    os.environ.update(rendezvous())
    backend = dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{backend}"
    store, _, _ = next(dist.rendezvous("env://", number, size))  # type: ignore[attr-defined]
    # TorchElastic keeps one store over restarts, and in it the addresses of those that are gone
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=number, world_size=size)
    return True


def leave_world() -> None:
    """Wait for all other processes, then part."""
    dist.barrier()
    dist.destroy_process_group()
