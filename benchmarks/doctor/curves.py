"""A short run on one rank, with a bug or without: what a user sees of it."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from hlat.checkpoint import checkpoint_store
from hlat.config.run import Config
from hlat.data.data_loader import DataLoader, build_data_loader, merge_state_dicts
from hlat.engine.engine_factory import create_engine
from hlat.engine.interface import Engine
from hlat.optim.lr_schedule import compute_lr
from hlat.parallelism.process_group import broadcast_object
from tests.distributed.mutants import MUTANTS


def losses(config: Config, mutant: str | None, steps: int, restarts: bool) -> list[float]:
    """The loss of each step of a run, which may go on half way from what it has saved."""
    with contextlib.nullcontext() if mutant is None else MUTANTS[mutant]():
        engine = create_engine(config)
        engine.build(config)
        loader = _open(config, engine)
        found = []
        for step in range(steps):
            if restarts and step == steps // 2:
                loader = _restarted(config, engine, loader)
            pending = engine.train_step(loader.next_batch(), compute_lr(step, config))
            found.append(engine.read(pending).loss)
        loader.close()
        engine.close()
    return found


def _restarted(config: Config, engine: Engine, loader: DataLoader) -> DataLoader:
    """The engine's state through the store, and a new loader where the old one was."""
    world = engine.world
    everyone = world.world_group
    states: list[Any] = everyone.gather_object([world.dp_rank, loader.state_dict()])
    state = broadcast_object(
        everyone, merge_state_dicts([*dict(states).values()]) if everyone.is_rank0 else None
    )
    loader.close()
    made = tempfile.mkdtemp() if everyone.is_rank0 else None
    folder = Path(broadcast_object(everyone, made))
    path = checkpoint_store.save_checkpoint(folder, 1, engine.chunks(), {}, world.rank, everyone)
    assert isinstance(path, Path)
    checkpoint_store.load_checkpoint(path, engine.chunks())
    again = _open(config, engine)
    again.load_state_dict(state)
    return again


def _open(config: Config, engine: Engine) -> DataLoader:
    share = engine.world.data_shard
    return build_data_loader(config.data, config.phase, config.batch, config.run.seed, *share)
