"""Simulate one rank of any layout with fake tensors and a fake process group.

Fake tensors have shapes only, and the fake process group completes collectives without other ranks.
So the training code itself gives the memory and the communication of one rank of thousands.

Usage: python tests/distributed/scale_rehearsal.py RANK OVERRIDE ...   (as of hlat.train)
"""

import dataclasses
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hlat.config.compose import register_configs
from hlat.config.optimizer import OptimizerConfig
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.native.pipeline_parallel import (
    DeviceBatch,
    PipelineRunner,
    _compute_boundary_shape,
)
from hlat.optim import optimizer_factory
from hlat.optim.adamw import ADAMW
from hlat.optim.update_rule import UpdateRule
from hlat.precision.torch_dtypes import TORCH_DTYPES


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """Memory and communication of one rank.

    Attributes:
        parameters: Shape of the shard of each parameter.
        weight_bytes: Bytes of the model weights.
        state_bytes: Bytes of the optimizer state: moments, and master weights if any.
        collectives: Calls and input bytes in a step, by axis and operation, without the messages
            between pipeline stages.
        build_seconds: Time to build the rank.
        peak_bytes: Peak memory of this process.
    """

    parameters: dict[str, tuple[int, ...]]
    weight_bytes: int
    state_bytes: int
    collectives: dict[str, tuple[int, int]]
    build_seconds: float
    peak_bytes: int


def rehearse(config: Config, rank: int) -> Rehearsal:
    """Build a rank of a run and train one step."""
    with _simulate_rank(config, rank):
        start = time.perf_counter()
        engine = NativeEngine()
        engine.build(config)
        build_seconds = time.perf_counter() - start
        tokens = np.zeros(
            (
                config.batch.global_batch_size // engine.parallel_state.dp_size,
                config.batch.sequence_length,
            ),
            np.int32,
        )
        engine.params.sync_model_params()
        engine._params_stale = False  # as in every step but the first
        with _CollectiveCounter(engine) as collectives:
            engine.train_step(PackedSequences(tokens, tokens), 0.0)
        weights = engine.params
        state = [
            tensor
            for name in weights.optimizer_params
            for key, tensor in weights.get_state(name).items()
            if key != "weights"
        ]
        if config.precision.master_weight_dtype is not None:
            state += weights.optimizer_params.values()
        return Rehearsal(
            {name: tuple(weight.param.shape) for name, weight in weights.local_params.items()},
            sum(weight.param.nbytes for weight in weights.local_params.values()),
            sum(tensor.nbytes for tensor in state),
            {
                key: (collectives.calls[key], collectives.bytes[key])
                for key in sorted(collectives.calls)
            },
            build_seconds,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


@contextmanager
def _simulate_rank(config: Config, rank: int) -> Iterator[None]:
    """Initialize a fake process group in which this process is one of all ranks."""
    size = config.num_processes
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch("hlat.distributed.process_groups._wait_for_members"),
            mock.patch("hlat.engine.native.native_engine.init_weights"),
            mock.patch("hlat.engine.native.native_engine.PipelineRunner", OneStageRunner),
            # The check updates one element and reads it; fake tensors have no values
            mock.patch.object(optimizer_factory, "get_update_rule", _build_fused_rule),
            FakeTensorMode(),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _build_fused_rule(settings: OptimizerConfig) -> UpdateRule:
    """Return the rule of AdamW without the check of its kernel."""
    assert ADAMW.fused is not None
    return replace(ADAMW, fused=replace(ADAMW.fused, is_available=lambda device, dtype: True))


class OneStageRunner(PipelineRunner):
    """Stages of one pipeline rank without the other ranks, one micro batch at a time."""

    def backward(self, batch: DeviceBatch, micro_batch_size: int, scale: float) -> Tensor:
        total = torch.zeros(())
        for micro in batch.split(micro_batch_size):
            shape = _compute_boundary_shape(micro.tokens.shape, self._config)
            dtype = TORCH_DTYPES[self._config.precision.compute_dtype]
            for number, part in self._model_parts.items():
                received = None
                if number > 0:
                    received = torch.empty(shape, dtype=dtype, requires_grad=True)
                y = part(micro.tokens, micro.documents, received)
                if number == self._last_stage:
                    y = self._loss_fn(part, y, micro.targets, scale)
                    total += y.detach()
                y.backward(torch.empty_like(y))
        return total


class _CollectiveCounter(TorchDispatchMode):
    """Counter of collectives by axis and operation."""

    NAMES = {
        "allreduce_": "all_reduce",
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
    }

    def __init__(self, engine: NativeEngine) -> None:
        super().__init__()
        mesh = engine._mesh
        self._axes = {
            axis.group.group_name: name
            for name, axis in (("kv", mesh.kv), ("tp", mesh.tp), ("dp", mesh.dp), ("pp", mesh.pp))
            if axis.group is not None
        }
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace == "c10d" and name in self.NAMES:
            given = args[1] if name.startswith("_") else args[0][0]
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            axis = self._axes[dist.ProcessGroup.unbox(group).group_name]
            key = f"{axis} {self.NAMES[name]}"
            self.calls[key] += 1
            self.bytes[key] += given.nbytes
        return function(*args, **(kwargs or {}))


def main() -> None:
    rank, *overrides = sys.argv[1:]
    register_configs()
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        config = resolve_config(compose("config", overrides))
    print(json.dumps(dataclasses.asdict(rehearse(config, int(rank))), indent=1))


if __name__ == "__main__":
    main()
