"""Errors of NxD (docs/neuron.md), planted by removing the workarounds of hlat's engine."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear

from hlat.config.run import Config
from hlat.distributed.pipeline_stages import assign_layers_to_stages
from hlat.distributed.state_shard import StateShard
from hlat.engine import state_shards
from hlat.engine.nxd import nxd_engine, nxd_layers
from hlat.engine.nxd.nxd_engine import NxdEngine

_COPIES = 2
"""Replicas of a key/value head in the layout of fault 5."""


def planted(fault: str | None) -> Any:
    """Return the context of a fault, or a null context."""
    return contextlib.nullcontext() if fault is None else FAULTS[fault]()


def _around(target: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
    """Replace a function by `make(function)`."""
    return lambda: mock.patch.object(target, name, make(getattr(target, name)))


def _column(*sizes: int, reduce_dtype: torch.dtype, **settings: Any) -> ColumnParallelLinear:
    """Use NxD's default dtype for reductions (1)."""
    return ColumnParallelLinear(*sizes, **settings)


def _without_masters(right: Any) -> Any:
    """Load the model weights without the master weights of the optimizer (2)."""

    def refresh(self: NxdEngine) -> None:
        before = {
            name: one.optimizer_param.detach().clone()
            for name, one in self.params.local_params.items()
        }
        right(self)
        for name, weight in self.params.local_params.items():
            weight.optimizer_param.data.copy_(before[name])

    return refresh


def _clips_by_nxd(right: Any) -> Any:
    """Clip gradients in NxD with `max_grad_norm` (3)."""

    def settings(config: Config) -> dict[str, Any]:
        limit = config.optimizer.grad_clip
        optimizer = {"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": limit}
        return right(config) | {"optimizer_config": optimizer}

    return settings


def _does_not_clip(right: Any) -> Any:
    """Disable clipping in hlat (3)."""

    def clip(self: NxdEngine, groups: list[dict[str, Any]]) -> Any:
        config = self.config
        self.config = replace(config, optimizer=replace(config.optimizer, grad_clip=None))
        finite = right(self, groups)
        self.config = config
        return finite

    return clip


@contextlib.contextmanager
def _clipped_at_one() -> Any:
    with (
        _around(nxd_engine, "build_nxd_config", _clips_by_nxd)(),
        _around(NxdEngine, "_clip_gradients", _does_not_clip)(),
    ):
        yield


def _counted(part: str, copies: Callable[[], int]) -> Callable[[Any], Any]:
    """Divide the squares of some parameters by another number of ranks (4)."""

    def make(right: Any) -> Any:
        def compute(*settings: Any) -> Any:
            found = right(*settings)
            wrong = {name: (shard, copies()) for name, (shard, _) in found.items() if part in name}
            return found | wrong

        return compute

    return make


def _repeats_rows(right: Any) -> Any:
    """Repeat rows instead of key/value heads (5)."""

    def initialise(shards: Iterable[StateShard], specs: Any, config: Config, tp: Any) -> None:
        shards = [*shards]
        right(shards, specs, config, tp)
        rank, size = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_size(),
        )
        for shard in shards:
            group, _, name = shard.name.partition("/")
            if group == "weights" and ("k_proj" in name or "v_proj" in name):
                settings = (specs[name], config.model, config.run.seed)
                full = torch.from_numpy(
                    state_shards.compute_initial_values(*settings, (0, 0), shard.shape)
                )
                shard.tensor.copy_(full.repeat_interleave(_COPIES, 0).chunk(size)[rank])

    return initialise


def _initialized_by_stage(right: Any) -> Any:
    """Initialize the layers of each stage as the first layers (6)."""

    def values(parameter: Any, model: Any, *rest: Any) -> Any:
        parts = parameter.name.split(".")
        if parts[1] == "layers":
            size = parallel_state.get_pipeline_model_parallel_size()
            rank = parallel_state.get_pipeline_model_parallel_rank()
            first = assign_layers_to_stages(model.num_layers, size)[rank][0]
            parts[2] = str(int(parts[2]) - first)
        return right(replace(parameter, name=".".join(parts)), model, *rest)

    return values


def _in_bf16(right: Any) -> Any:
    """Compute the mean square in bf16 (7)."""

    def init(self: Any, model: Any, dtype: torch.dtype) -> None:
        right(self, model, torch.bfloat16)

    return init


FAULTS: dict[str, Callable[[], Any]] = {
    "1 input gradients not summed": lambda: mock.patch.object(
        nxd_layers, "ColumnParallelLinear", _column
    ),
    "2 masters not loaded": _around(NxdEngine, "_sync_stale_params", _without_masters),
    "3 clipped at one": _clipped_at_one,
    "4 marks lost": _around(
        nxd_engine,
        "compute_param_shards",
        _counted("qkv_proj.weight", parallel_state.get_tensor_model_parallel_size),
    ),
    "4 key/value copies count each": _around(
        nxd_engine, "compute_param_shards", _counted("weight_", lambda: 1)
    ),
    "5 rows repeated": _around(nxd_engine, "init_weights", _repeats_rows),
    "6 stages drawn alike": _around(state_shards, "compute_initial_values", _initialized_by_stage),
    "7 norms in bf16": _around(nxd_layers.NxdRMSNorm, "__init__", _in_bf16),
}
