"""What a rank does with hlat's engine; each function returns what a test compares."""

import dataclasses
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
from tests.distributed.checks import EOS, RATE, batches, losses_after, own


def _built(config: Config) -> NxdEngine:
    engine = create_engine(config)
    assert isinstance(engine, NxdEngine)
    engine.build(config)
    return engine


def train(config: Config, steps: int) -> list[tuple[float, ...]]:
    """Loss, gradient norm and weights' norm of each step, and `losses_after` of the first batch."""
    engine, every = _built(config), batches(config, steps)
    rows = [
        dataclasses.astuple(engine.read(engine.train_step(own(batch, engine), RATE)))
        for batch in every
    ]
    return [*rows, losses_after(engine, every[0])]


def refusals_of_texts(config: Config) -> list[str]:
    """What is said when texts are to be read, and when weights alone are to be held for that."""
    return [
        _refusal(lambda: _built(config).create_decode_state()),
        _refusal(lambda: NxdEngine().build(config, training=False)),
    ]


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def slices(config: Config) -> dict[Any, NDArray[Any]]:
    """After one step, every slice of the state that this rank is to save."""
    engine = _built(config)
    engine.train_step(own(batches(config, 1)[0], engine), RATE)
    return _slices(engine)


def _slices(engine: NxdEngine) -> dict[Any, NDArray[Any]]:
    return {
        (chunk.name, chunk.offset): chunk.tensor.float().numpy().reshape(chunk.size).copy()
        for chunk in engine.chunks()
        if chunk.is_main_replica
    }


def save_and_continue(config: Config, folder: Path, steps: int) -> list[tuple[float, ...]]:
    """Train, save, train on: the numbers of the steps after the save."""
    engine, every = _built(config), batches(config, 2 * steps)
    for batch in every[:steps]:
        engine.train_step(own(batch, engine), RATE)
    checkpoint_store.save_checkpoint(
        folder, steps, engine.chunks(), {"step": steps}, engine.world.world_group
    )
    return _rest(engine, every[steps:])


def load_and_continue(config: Config, path: Path, steps: int) -> list[tuple[float, ...]]:
    """Restore what was saved after so many steps, and train on."""
    engine = _built(config)
    checkpoint_store.load_checkpoint(path, engine.chunks())
    return _rest(engine, batches(config, 2 * steps)[steps:])


def copies(config: Config, steps: int) -> list[Any]:
    """What ranks hold differently after some steps."""
    engine = _built(config)
    for batch in batches(config, steps):
        engine.train_step(own(batch, engine), RATE)
    return engine.find_replica_mismatches()


def compilations(config: Config, steps: int) -> list[tuple[int, int]]:
    """How many graphs XLA has compiled after each step, at another learning rate each, and how many
    operators have run on the host, as what XLA does not have; at the end after such a one."""
    engine, counts = _built(config), []
    for number, batch in enumerate(batches(config, steps)):
        pending = engine.train_step(own(batch, engine), RATE / (1 + number))
        if number < 2 or number > 9:
            engine.read(pending)
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


def _rest(engine: NxdEngine, every: list[NDArray[Any]]) -> list[tuple[float, ...]]:
    return [
        dataclasses.astuple(engine.read(engine.train_step(own(batch, engine), RATE)))
        for batch in every
    ]


def train_and_tell(config: Config, steps: int) -> tuple[list[tuple[float, ...]], list[str]]:
    """What `train` returns, and dtypes: of weights, what is updated, its moment and gradient."""
    seen = set()

    class Watching(NxdEngine):
        def _clip_gradients(self, groups: list[dict[str, Any]]) -> Tensor:
            for weight in self.params.local_params.values():
                kept = self.params.adamw.state[weight.optimizer_param]["exp_avg"]
                four = (weight.param, weight.optimizer_param, kept, weight.optimizer_param.grad)
                seen.add(tuple(str(tensor.dtype) for tensor in four))
            return super()._clip_gradients(groups)

    with mock.patch("hlat.engine.nxd.nxd_engine.NxdEngine", Watching):
        rows = train(config, steps)
    (dtypes,) = seen
    return rows, [*dtypes]


def equalised(config: Config) -> tuple[list[ReplicaMismatch], list[ReplicaMismatch]]:
    """What ranks hold differently after each has changed all it keeps, and after equalising."""
    engine = _built(config)
    engine.train_step(own(batches(config, 1)[0], engine), RATE)
    tp = parallel_state.get_tensor_model_parallel_rank()
    for name in engine.params.local_params:
        for kind, tensor in engine.params.get_state(name).items():
            if kind != "step":
                tensor += tp
    before = engine.find_replica_mismatches()
    engine._sync_from_host()
    engine.params.broadcast_replicas()
    return before, engine.find_replica_mismatches()


def train_and_place(
    config: Config, steps: int
) -> tuple[list[tuple[float, ...]], dict[str, list[int]]]:
    """What `train` returns, and the ranks along each axis of this one."""
    return train(config, steps), {
        axis: ranks for axis, (ranks, _) in nxd_process_groups.get_nxd_groups().items()
    }


def examination(config: Config) -> DeviceReport:
    """What this rank's device shows, in a hurry."""
    with mock.patch(
        "hlat.engine.device_checks._ACCELERATOR_BURN_IN", BurnInConfig(128, 0.02, 1 << 12)
    ):
        return create_engine(config).run_device_checks(config)


def slices_and_loss(config: Config) -> tuple[dict[Any, NDArray[Any]], float]:
    """What `slices` returns, and the loss on the same batch then."""
    engine, batch = _built(config), batches(config, 1)[0]
    engine.train_step(own(batch, engine), RATE)
    loss = engine.read(
        engine.eval_step(PackedSequences(batch, compute_document_ids(batch, EOS)))
    ).loss
    return _slices(engine), loss


def held_alone(config: Config) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and bytes of each parameter of this rank, of a world that is not there."""
    new_group = dist.distributed_c10d.new_group

    def pretended(ranks: list[int] | None = None, **options: Any) -> Any:
        return new_group(ranks, backend="fake")

    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=size
    )
    with (
        mock.patch.object(dist, "new_group", pretended),
        mock.patch.object(dist.distributed_c10d, "new_group", pretended),
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


def trained(config: Config, config_yaml: str) -> int:
    """The exit code of a whole run."""
    return int(hlat.train.run_worker(config, config_yaml, []))


def fetches(config: Config, folder: Path) -> list[tuple[int, int]]:
    """Parameters copied from the device, and those kept, by part of a run.

    The parts: building, saving and loading before the first step; a comparison after it; a save.
    """
    engine, batch, parts = create_engine(config), batches(config, 1)[0], []
    assert isinstance(engine, NxdEngine)
    copied = list[Tensor]()

    def end_part() -> None:
        parts.append((len(copied), len(engine._host_state)))
        copied.clear()

    to = Tensor.to

    def listen(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        is_count = tensor.dtype is torch.int32
        if arguments[:1] == ("cpu",) and not is_count and options.get("copy"):
            copied.append(tensor)
        return to(tensor, *arguments, **options)

    with mock.patch.object(Tensor, "to", listen):
        engine.build(config)
        path = checkpoint_store.save_checkpoint(
            folder, 0, engine.saved_chunks(), {}, engine.world.world_group
        )
        checkpoint_store.load_checkpoint(path, engine.chunks())
        end_part()
        engine.train_step(own(batch, engine), RATE)
        assert engine.find_replica_mismatches() == []
        end_part()
        assert all(chunk.is_main_replica for chunk in engine.saved_chunks())
        end_part()
    return parts
