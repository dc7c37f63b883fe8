"""Functions that run on ranks and return results for comparison."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hlat.checkpoint import checkpoint_store
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences, compute_document_ids
from hlat.distributed.tensor_slice import TensorSlice
from hlat.engine.interface import Engine
from hlat.engine.native.native_engine import NativeEngine
from hlat.model.canonical_views import iter_row_views
from tests.support.tensor_slices import is_partition

MODEL = [
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.vocab_size=131",
    "batch.global_batch_size=16",
    "batch.sequence_length=32",
]
RATE = 1e-3
EOS = 7


def layers(layout: str) -> str:
    """Return few layers, which give pipeline stages unequal numbers of layers."""
    if "pp=4" in layout or "stages_per_rank=" in layout:
        return "model.num_layers=6"
    if "pp=3" in layout:
        return "model.num_layers=4"
    return f"model.num_layers={3 if 'pp=' in layout else 2}"


def batches(config: Config, steps: int) -> list[NDArray[np.int32]]:
    """Return global batches."""
    size = (config.batch.global_batch_size, config.batch.sequence_length)
    generator = np.random.default_rng(0)
    return [generator.integers(0, config.model.vocab_size, size, np.int32) for _ in range(steps)]


def shard_batch(batch: NDArray[np.int32], engine: Engine) -> PackedSequences:
    """Return the rows of a data-parallel rank."""
    rows = batch[engine.parallel_state.dp_rank :: engine.parallel_state.dp_size]
    return PackedSequences(rows, compute_document_ids(rows, EOS))


def train(config: Config, steps: int) -> list[tuple[float, ...]]:
    """Return loss, gradient norm and weight norm of each step, and `losses_after` of the first batch."""
    if config.compiler.torch_compile:
        torch.compiler.reset()  # layers that this process compiled count towards a limit
    engine = NativeEngine()
    engine.build(config)
    all_batches = batches(config, steps)
    rows = [run_step(engine, batch) for batch in all_batches]
    after = losses_after(engine, all_batches[0])
    engine.close()
    return [*rows, after]


def losses_after(engine: Engine, batch: NDArray[np.int32]) -> tuple[float, float]:
    """Return the loss of five sequences, and of their first seven targets only."""
    tokens, documents = batch[:5], compute_document_ids(batch[:5], EOS)
    full, first = (
        PackedSequences(tokens, documents),
        PackedSequences(tokens, documents, np.indices(tokens.shape)[1] <= 7),
    )
    return engine.read_metrics(engine.eval_step(full)).loss, engine.read_metrics(
        engine.eval_step(first)
    ).loss


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """Results of one rank.

    Attributes:
        rows: Loss, gradient norm and weight norm of each step, and `losses_after` of the first batch.
        shards: Values of each shard that this rank saves after the first step, by name and offset.
        eval_loss: Loss of the first batch after the first step.
    """

    rows: list[tuple[float, ...]]
    shards: dict[tuple[str, tuple[int, ...]], NDArray[Any]]
    eval_loss: float


def train_and_record(config: Config, steps: int) -> TrainingRecord:
    """Train, and record weights, first moments and the evaluation loss after the first step."""
    engine = NativeEngine()
    engine.build(config)
    all_batches = batches(config, steps)
    first, *others = all_batches
    rows = [run_step(engine, first)]
    documents = compute_document_ids(first, EOS)
    eval_loss = engine.read_metrics(engine.eval_step(PackedSequences(first, documents))).loss
    shards = {
        (shard.name, shard.offset): shard.tensor.float().numpy().reshape(shard.size).copy()
        for shard in engine.state_shards()
        if shard.is_main_replica and shard.name.startswith(("weights/", "exp_avg/"))
    }
    rows += [run_step(engine, batch) for batch in others]
    rows.append(losses_after(engine, first))
    engine.close()
    return TrainingRecord(rows, shards, eval_loss)


def run_step(engine: Engine, batch: NDArray[np.int32]) -> tuple[Any, ...]:
    """Train a step, and return loss, norms of gradients and weights, and skipped steps."""
    metrics = engine.read_metrics(engine.train_step(shard_batch(batch, engine), RATE))
    return *metrics.scalars.values(), metrics.num_skipped


def joined(found: list[dict[Any, Any]]) -> dict[str, NDArray[Any]]:
    """Assemble tensors from the shards of all ranks."""
    pieces: dict[str, list[tuple[TensorSlice, NDArray[Any]]]] = {}
    for (name, offset), values in (item for slices in found for item in slices.items()):
        pieces.setdefault(name, []).append((TensorSlice(offset, values.shape), values))
    tensors = {}
    for name, parts in pieces.items():
        shape = tuple(
            max(piece.offset[i] + piece.size[i] for piece, _ in parts)
            for i in range(parts[0][1].ndim)
        )
        assert is_partition([piece for piece, _ in parts], shape)
        tensors[name] = np.empty(shape, np.float32)
        for piece, values in parts:
            tensors[name][piece.index_in(TensorSlice((0,) * len(shape), shape))] = values
    return tensors


def digests(config: Config, steps: int) -> dict[Any, str]:
    """Return a digest of each canonical slice that the model reads on this rank after some steps."""
    engine = NativeEngine()
    engine.build(config)
    for batch in batches(config, steps):
        engine.train_step(shard_batch(batch, engine), RATE)
    found = {}
    for weight in engine.params.local_params.values():
        for rows, view, _ in iter_row_views(weight.shard.rows, weight.param.detach()):
            content = view.float().contiguous().numpy().tobytes()
            key = (rows, weight.shard.columns)
            found[key] = hashlib.sha256(content).hexdigest()
    engine.close()
    return found


def save_and_continue(config: Config, folder: Path, steps: int) -> list[tuple[float, ...]]:
    """Train, save, continue, and return the metrics of the steps after the save."""
    engine = NativeEngine()
    engine.build(config)
    all_batches = batches(config, 2 * steps)
    for batch in all_batches[:steps]:
        engine.train_step(shard_batch(batch, engine), RATE)
    checkpoint_store.save_checkpoint(
        folder, steps, engine.state_shards(), {"step": steps}, engine.parallel_state.world_group
    )
    return _rest(engine, all_batches[steps:])


def load_and_continue(config: Config, path: Path, steps: int) -> list[tuple[float, ...]]:
    """Load the checkpoint of `save_and_continue`, continue, and return the metrics of those steps."""
    engine = NativeEngine()
    engine.build(config)
    checkpoint_store.load_checkpoint(path, engine.state_shards())
    return _rest(engine, batches(config, 2 * steps)[steps:])


def _rest(engine: NativeEngine, all_batches: list[NDArray[np.int32]]) -> list[tuple[float, ...]]:
    rows = [run_step(engine, batch) for batch in all_batches]
    engine.close()
    return rows
