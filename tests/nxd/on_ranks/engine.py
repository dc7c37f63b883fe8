"""What a rank does with hlat's engine; each function returns what a test compares."""

import dataclasses
from pathlib import Path
from typing import Any

import torch_xla.debug.metrics
from numpy.typing import NDArray

from hlat.checkpoint import store
from hlat.config.run import Config
from hlat.data.sequences import Sequences, document_ordinals
from hlat.engine.nxd.engine import NxdEngine
from tests.distributed.checks import EOS, RATE, batches, own


def _built(config: Config) -> NxdEngine:
    engine = NxdEngine()
    engine.build(config)
    return engine


def train(config: Config, steps: int) -> list[tuple[float, ...]]:
    """Loss, gradient norm and weights' norm of each step, and the loss of five sequences after."""
    engine, every = _built(config), batches(config, steps)
    rows = [
        dataclasses.astuple(engine.read(engine.train_step(own(batch, engine), RATE)))
        for batch in every
    ]
    some = Sequences(every[0][:5], document_ordinals(every[0][:5], EOS))
    return [*rows, (engine.read(engine.eval_step(some)).loss,)]


def slices(config: Config) -> dict[Any, NDArray[Any]]:
    """After one step, every slice of the state that this rank is to save."""
    engine = _built(config)
    engine.train_step(own(batches(config, 1)[0], engine), RATE)
    return {
        (chunk.name, chunk.offset): chunk.tensor.float().numpy().reshape(chunk.size).copy()
        for chunk in engine.chunks()
        if chunk.saved
    }


def save_and_go_on(config: Config, folder: Path, steps: int) -> list[tuple[float, ...]]:
    """Train, save, train on: the numbers of the steps after the save."""
    engine, every = _built(config), batches(config, 2 * steps)
    for batch in every[:steps]:
        engine.train_step(own(batch, engine), RATE)
    world = engine.world
    store.save(folder, steps, engine.chunks(), {"step": steps}, world.rank, world.everyone)
    return _rest(engine, every[steps:])


def go_on(config: Config, path: Path, steps: int) -> list[tuple[float, ...]]:
    """Restore what was saved after so many steps, and train on."""
    engine = _built(config)
    store.restore(path, engine.chunks())
    return _rest(engine, batches(config, 2 * steps)[steps:])


def copies(config: Config, steps: int) -> list[Any]:
    """What ranks hold differently after some steps."""
    engine = _built(config)
    for batch in batches(config, steps):
        engine.train_step(own(batch, engine), RATE)
    return engine.compare_copies()


def compilations(config: Config, steps: int) -> list[int]:
    """How many graphs XLA has compiled after each step, at another learning rate each."""
    engine, counts = _built(config), []
    for number, batch in enumerate(batches(config, steps)):
        engine.train_step(own(batch, engine), RATE / (1 + number))
        metric = torch_xla.debug.metrics.metric_data("CompileTime")
        counts.append(0 if metric is None else metric[0])
    return counts


def _rest(engine: NxdEngine, every: list[NDArray[Any]]) -> list[tuple[float, ...]]:
    return [
        dataclasses.astuple(engine.read(engine.train_step(own(batch, engine), RATE)))
        for batch in every
    ]
