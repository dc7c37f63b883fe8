"""What a rank does in a test; each function returns what the test compares."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.run import Config
from hlat.data.sequences import Sequences, document_ordinals
from hlat.engine.native.engine import NativeEngine
from hlat.model.canonical_views import views

RATE = 1e-3
EOS = 7


def batches(config: Config, steps: int) -> list[NDArray[np.int32]]:
    """Global batches."""
    size = (config.batch.global_batch_size, config.batch.sequence_length)
    generator = np.random.default_rng(0)
    return [generator.integers(0, config.model.vocab_size, size, np.int32) for _ in range(steps)]


def own(batch: NDArray[np.int32], engine: NativeEngine) -> Sequences:
    """The rows of a data-parallel rank."""
    rows = batch[engine.world.dp_rank :: engine.world.dp_size]
    return Sequences(rows, document_ordinals(rows, EOS))


def train(config: Config, steps: int) -> list[tuple[float, ...]]:
    """Loss, gradient norm and weights' norm of each step, and the loss on the first batch after."""
    engine = NativeEngine()
    engine.build(config)
    every = batches(config, steps)
    rows = [
        dataclasses.astuple(engine.read(engine.train_step(own(batch, engine), RATE)))
        for batch in every
    ]
    after = engine.read(
        engine.eval_step(Sequences(every[0][:5], document_ordinals(every[0][:5], EOS)))
    )
    engine.close()
    return [*rows, (after.loss,)]


def moments(config: Config) -> dict[str, Any]:
    """After one step, the first moment of every slice that this rank is to save."""
    engine = NativeEngine()
    engine.build(config)
    engine.train_step(own(batches(config, 1)[0], engine), RATE)
    found = {
        (chunk.name, chunk.offset): chunk.tensor.float().numpy().reshape(chunk.size).copy()
        for chunk in engine.chunks()
        if chunk.saved and chunk.name.startswith("exp_avg/")
    }
    engine.close()
    return found


def digests(config: Config, steps: int) -> dict[Any, str]:
    """After some steps, a digest of each canonical slice that the model reads on this rank."""
    engine = NativeEngine()
    engine.build(config)
    for batch in batches(config, steps):
        engine.train_step(own(batch, engine), RATE)
    found = {}
    for weight in engine.weights.held.values():
        for rows, view, _ in views(weight.shard.rows, weight.computing.detach()):
            content = view.float().contiguous().numpy().tobytes()
            key = (rows, weight.shard.columns)
            found[key] = hashlib.sha256(content).hexdigest()
    engine.close()
    return found
