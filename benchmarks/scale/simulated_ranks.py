"""Ranks of a large run in one process, with shards without memory and a mesh without network.

Only the code of one rank is timed. The messages that it receives in a gather are computed by the
same code as the other ranks, outside of the timed part.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from hlat.config.model import ModelConfig
from hlat.distributed.mesh_axis import MeshAxis
from hlat.distributed.mesh_coordinates import (
    MeshCoordinates,
    ParallelDegrees,
    compute_mesh_coordinates,
)
from hlat.distributed.mesh_object_group import MeshObjectGroup
from hlat.distributed.parameter_shards import compute_shard
from hlat.distributed.pipeline_stages import assign_layers_to_stages
from hlat.distributed.state_shard import StateShard
from hlat.engine.state_shards import iter_state_shards
from hlat.model.decoder_spec import list_module_parameters, list_parameter_specs
from hlat.model.parameter_spec import ModuleParameter
from hlat.optim.adamw_spec import AdamWSpec
from hlat.optim.optimizer_spec import list_state_names

AXES = ("pp", "dp", "tp")


class SimulatedRun:
    """Chunks of each rank of a run with ZeRO-1, as the native engine yields them."""

    def __init__(self, model: ModelConfig, degrees: ParallelDegrees) -> None:
        self.model, self.degrees = model, degrees
        self._specs = {spec.name: spec for spec in list_parameter_specs(model)}
        stages = assign_layers_to_stages(model.num_layers, degrees.pp)
        stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
        self._parameters: list[list[ModuleParameter]] = [[] for _ in stages]
        last = len(stages) - 1
        for parameter in list_module_parameters(model):
            parts = parameter.name.split(".")
            stage = stage_of[int(parts[1])] if parts[0] == "layers" else None
            if stage is None:
                stage = 0 if parts[0].startswith("embed") else last
            self._parameters[stage].append(parameter)
        self._shard = lru_cache(maxsize=None)(lambda p, tp: compute_shard(p, degrees.tp, tp))

    def state_shards(self, rank: int, allocate: bool = False) -> Iterator[StateShard]:
        """Yield the shards of a rank, on the meta device unless `allocate`."""
        at = compute_mesh_coordinates(rank, self.degrees)
        device = "cpu" if allocate else "meta"
        for parameter in self._parameters[at.pp]:
            shard = self._shard(parameter, at.tp)
            num_rows, is_vector = shard.shape[0], shard.columns is None
            step = -(-num_rows // self.degrees.dp)
            first, last = (0, num_rows) if is_vector else (at.dp * step, (at.dp + 1) * step)
            rows = shard.slice_rows(min(first, num_rows), min(last, num_rows))
            if rows.shape[0]:
                keys = ("weights", *list_state_names(AdamWSpec()))
                state = {key: torch.empty(rows.shape, device=device) for key in keys}
                state["step"] = torch.zeros((), device=device)
                owns = not is_vector or at.dp == 0
                yield from iter_state_shards(state, rows, self._specs, owns)

    def coordinates(self, rank: int) -> MeshCoordinates:
        """Return the coordinates of a rank."""
        return compute_mesh_coordinates(rank, self.degrees)


class Clock:
    """CPU time of one rank, without the time of the simulation."""

    def __init__(self) -> None:
        self.excluded, self._start = 0.0, time.process_time()

    def exclude_since(self, start: float) -> None:
        """Exclude the time from `start` until now."""
        self.excluded += time.process_time() - start

    def read(self) -> float:
        """Return the seconds of the rank."""
        return time.process_time() - self._start - self.excluded


class _CapturedError(BaseException):
    def __init__(self, message: bytes) -> None:
        self.message = message


class _SimulatedAxis(MeshAxis):
    """Axis that computes the other ranks' messages of the gather number `SimulatedMesh.gather`."""

    def __init__(self, mesh: "SimulatedMesh", name: str) -> None:
        degrees, at = mesh.run.degrees, mesh.run.coordinates(mesh.rank)
        self._mesh, self._name = mesh, name
        self.size, self.rank = getattr(degrees, name), getattr(at, name)
        self.group = None

    def broadcast(self, message: bytes | None) -> bytes:
        return self._mesh.broadcast(message, self._name)

    def all_gather_object(self, message: bytes) -> list[bytes]:
        return self._mesh.gather(message, self._name)


class SimulatedMesh:
    """Collectives of one rank with all other ranks of a run.

    `act` runs the collectives of a rank, given its group. It is also called for the other ranks to
    compute their messages in the gather number `index`.
    """

    def __init__(
        self, run: SimulatedRun, act: Callable[[int, MeshObjectGroup], Any], index: int = 0
    ) -> None:
        self.run, self.act, self.index = run, act, index
        self.rank, self.clock = 0, Clock()
        self.sent: list[bytes] = []
        self.num_received_bytes = 0
        self._capture: str | None = None
        self._num_gathers = 0
        self._replayed = 0

    def start(self) -> Any:
        """Act as rank 0; return the result."""
        self.clock = Clock()
        return self.act(0, self._build_group())

    def _build_group(self) -> MeshObjectGroup:
        return MeshObjectGroup([_SimulatedAxis(self, name) for name in AXES])

    def broadcast(self, message: bytes | None, name: str) -> bytes:
        """Record the message of rank 0, or replay it."""
        if self._capture is None:
            assert message is not None
            if name == AXES[-1]:
                self.sent.append(message)
            return message
        if name == AXES[-1]:
            self._replayed += 1
        return self.sent[max(self._replayed - 1, 0)]

    def gather(self, message: bytes, name: str) -> list[bytes]:
        """Return the messages along an axis; they are copies except in the gather `index`."""
        size = getattr(self.run.degrees, name)
        if name == AXES[-1]:
            self._num_gathers += 1
        if self._num_gathers - 1 != self.index:
            return [message] * size
        if self._capture == name:
            raise _CapturedError(message)
        start = time.process_time()
        at = self.run.coordinates(self.rank)
        others = [
            self._act_as(MeshCoordinates(**{**vars(at), name: i}), name) for i in range(1, size)
        ]
        self.clock.exclude_since(start)
        if self._capture is None:
            self.num_received_bytes += sum(map(len, others))
        return [message, *others]

    def act_as(self, rank: int) -> Any:
        """Act as another rank, after `start`; gathers return copies of its message."""
        self.rank, self._capture, self._num_gathers, self._replayed = rank, "", 0, 0
        self.clock = Clock()
        return self.act(rank, self._build_group())

    def _act_as(self, at: MeshCoordinates, axis: str) -> bytes:
        saved = self.rank, self._capture, self._num_gathers, self._replayed, self.clock
        degrees = self.run.degrees
        self.rank = (at.pp * degrees.dp + at.dp) * degrees.tp + at.tp
        self._capture, self._num_gathers, self._replayed = axis, 0, 0
        self.clock = Clock()
        try:
            self.act(self.rank, self._build_group())
        except _CapturedError as captured:
            return captured.message
        finally:
            self.rank, self._capture, self._num_gathers, self._replayed, self.clock = saved
        raise AssertionError("the rank did not gather")
