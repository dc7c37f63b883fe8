"""Functions that run on ranks with hlat's engine on NxD and return results for comparison."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics
from neuronx_distributed.parallel_layers import parallel_state
from numpy.typing import NDArray
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import hlat.train
from hlat.checkpoint import checkpoint_store
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences, compute_document_ids
from hlat.engine.device_checks import BurnInConfig
from hlat.engine.engine_factory import create_engine
from hlat.engine.interface import DeviceReport, ReplicaMismatch
from hlat.engine.nxd import nxd_process_groups
from hlat.engine.nxd.nxd_engine import NxdEngine
from hlat.engine.nxd.nxd_parameters import compute_param_shards
from tests.distributed.checks import EOS, RATE, batches, losses_after, run_step, shard_batch


def _built(config: Config) -> NxdEngine:
    engine = create_engine(config)
    assert isinstance(engine, NxdEngine)
    engine.build(config)
    return engine


def train(config: Config, steps: int) -> list[tuple[float, ...]]:
    """Return loss and norms of gradients and weights per step, and the final `losses_after`."""
    engine, all_batches = _built(config), batches(config, steps)
    rows = _rest(engine, all_batches)
    return [*rows, losses_after(engine, all_batches[0])]


def decoding_errors(config: Config) -> list[str]:
    """Return the errors of decoding and of building an engine without training state."""
    return [
        _config_error(lambda: _built(config).create_decode_state()),
        _config_error(lambda: NxdEngine().build(config, training=False)),
    ]


def _config_error(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def slices(config: Config) -> dict[Any, NDArray[Any]]:
    """Return the state slices that this rank saves after one step."""
    engine = _built(config)
    engine.train_step(shard_batch(batches(config, 1)[0], engine), RATE)
    return _slices(engine)


def _slices(engine: NxdEngine) -> dict[Any, NDArray[Any]]:
    return {
        (shard.name, shard.offset): shard.tensor.float().numpy().reshape(shard.size).copy()
        for shard in engine.state_shards()
        if shard.is_main_replica
    }


def save_and_continue(config: Config, folder: Path, steps: int) -> list[tuple[float, ...]]:
    """Train, save, continue, and return the metrics of the steps after the save."""
    engine, all_batches = _built(config), batches(config, 2 * steps)
    for batch in all_batches[:steps]:
        engine.train_step(shard_batch(batch, engine), RATE)
    checkpoint_store.save_checkpoint(
        folder, steps, engine.state_shards(), {"step": steps}, engine.parallel_state.world_group
    )
    return _rest(engine, all_batches[steps:])


def load_and_continue(config: Config, path: Path, steps: int) -> list[tuple[float, ...]]:
    """Load the checkpoint of `save_and_continue`, continue, and return the metrics."""
    engine = _built(config)
    checkpoint_store.load_checkpoint(path, engine.state_shards())
    return _rest(engine, batches(config, 2 * steps)[steps:])


def replica_mismatches(config: Config, steps: int) -> list[Any]:
    """Return the mismatches between replicas after some steps."""
    engine = _built(config)
    for batch in batches(config, steps):
        engine.train_step(shard_batch(batch, engine), RATE)
    return engine.find_replica_mismatches()


def compilations(config: Config, steps: int) -> list[tuple[int, int]]:
    """Return the numbers of compiled graphs and of operators on the host after each step.

    Each step has another learning rate. The last row is after an operator that XLA lacks.
    """
    engine, counts = _built(config), []
    for number, batch in enumerate(batches(config, steps)):
        pending = engine.train_step(shard_batch(batch, engine), RATE / (1 + number))
        if number < 2 or number > 9:
            engine.read_metrics(pending)
        metric = torch_xla.debug.metrics.metric_data("CompileTime")
        counts.append((0 if metric is None else metric[0], _count_operators_on_host()))
        if number == 4:
            engine.find_replica_mismatches()
    engine._num_skipped.item()
    return [*counts, (counts[-1][0], _count_operators_on_host())]


def _count_operators_on_host() -> int:
    names = torch_xla.debug.metrics.counter_names()
    counters = (name for name in names if name.startswith("aten::"))
    return sum(torch_xla.debug.metrics.counter_value(name) for name in counters)


def _rest(engine: NxdEngine, all_batches: list[NDArray[Any]]) -> list[tuple[float, ...]]:
    return [run_step(engine, batch) for batch in all_batches]


def train_with_dtypes(config: Config, steps: int) -> tuple[list[tuple[float, ...]], list[str]]:
    """Return `train`, and dtypes of weight, updated parameter, first moment and gradient."""
    seen = set()

    class DtypeRecorder(NxdEngine):
        def _clip_gradients(self, groups: list[dict[str, Any]]) -> Tensor:
            for weight in self.params.local_params.values():
                exp_avg = self.params.base_optimizer.state[weight.optimizer_param]["exp_avg"]
                tensors = (
                    weight.param,
                    weight.optimizer_param,
                    exp_avg,
                    weight.optimizer_param.grad,
                )
                seen.add(tuple(str(tensor.dtype) for tensor in tensors))
            return super()._clip_gradients(groups)

    with mock.patch("hlat.engine.nxd.nxd_engine.NxdEngine", DtypeRecorder):
        rows = train(config, steps)
    (dtypes,) = seen
    return rows, [*dtypes]


def synchronize_replicas(config: Config) -> tuple[list[ReplicaMismatch], list[ReplicaMismatch]]:
    """Return the mismatches after each rank changed its state, and after the broadcast."""
    engine = _built(config)
    engine.train_step(shard_batch(batches(config, 1)[0], engine), RATE)
    tp = parallel_state.get_tensor_model_parallel_rank()
    for name in engine.params.local_params:
        for key, tensor in engine.params.get_state(name).items():
            if key != "step":
                tensor += tp
    before = engine.find_replica_mismatches()
    engine._sync_stale_params()
    engine.params.broadcast_replicas()
    return before, engine.find_replica_mismatches()


def train_with_groups(
    config: Config, steps: int
) -> tuple[list[tuple[float, ...]], dict[str, list[int]]]:
    """Return `train`, and the ranks of this rank's group along each axis."""
    return train(config, steps), {
        name: [*axis.ranks] for name, axis in nxd_process_groups.build_device_axes().items()
    }


def device_report(config: Config) -> DeviceReport:
    """Return the report of short device checks."""
    with mock.patch(
        "hlat.engine.device_checks._ACCELERATOR_BURN_IN", BurnInConfig(128, 0.02, 1 << 12)
    ):
        return create_engine(config).run_device_checks(config)


def slices_and_loss(config: Config) -> tuple[dict[Any, NDArray[Any]], float]:
    """Return `slices`, and the loss of the same batch after the step."""
    engine, batch = _built(config), batches(config, 1)[0]
    engine.train_step(shard_batch(batch, engine), RATE)
    loss = engine.read_metrics(
        engine.eval_step(PackedSequences(batch, compute_document_ids(batch, EOS)))
    ).loss
    return _slices(engine), loss


def build_one_rank(config: Config) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return shape and bytes of the parameters of one rank, with a fake process group."""
    new_group = dist.distributed_c10d.new_group

    def new_fake_group(ranks: list[int] | None = None, **options: Any) -> Any:
        return new_group(ranks, backend="fake")

    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=size
    )
    with (
        mock.patch.object(dist, "new_group", new_fake_group),
        mock.patch.object(dist.distributed_c10d, "new_group", new_fake_group),
        mock.patch("hlat.distributed.process_groups._wait_for_members"),
        mock.patch.object(xm, "rendezvous"),
        mock.patch.object(NxdEngine, "_build_params"),
        mock.patch("hlat.engine.nxd.nxd_engine.init_weights"),
    ):
        engine = _built(config)
    named = {
        name.removeprefix("module.").removeprefix("model."): param
        for name, param in engine._model.named_parameters()
    }
    compute_param_shards(config, named)
    return {name: (tuple(one.shape), one.nbytes) for name, one in named.items()}


def run_worker(config: Config, config_yaml: str) -> int:
    """Train a complete run and return its exit code."""
    return int(hlat.train.run_worker(config, config_yaml, []))


def count_copied_tensors(config: Config, folder: Path) -> list[tuple[int, int]]:
    """Return the numbers of tensors copied from the device and cached on the host, by part.

    The parts: build, save and load before the first step; a comparison after it; a save.
    """
    engine, batch, parts = create_engine(config), batches(config, 1)[0], []
    assert isinstance(engine, NxdEngine)
    copied = list[Tensor]()

    def end_part() -> None:
        parts.append((len(copied), len(engine._host_state._tensors)))
        copied.clear()

    to = Tensor.to

    def record_copies(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        is_count = tensor.dtype is torch.int32
        if arguments[:1] == ("cpu",) and not is_count and options.get("copy"):
            copied.append(tensor)
        return to(tensor, *arguments, **options)

    with mock.patch.object(Tensor, "to", record_copies):
        engine.build(config)
        path = checkpoint_store.save_checkpoint(
            folder, 0, engine.saved_state_shards(), {}, engine.parallel_state.world_group
        )
        checkpoint_store.load_checkpoint(path, engine.state_shards())
        end_part()
        engine.train_step(shard_batch(batch, engine), RATE)
        assert engine.find_replica_mismatches() == []
        end_part()
        assert all(shard.is_main_replica for shard in engine.saved_state_shards())
        end_part()
    return parts
