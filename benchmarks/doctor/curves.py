"""A short run on one rank, with a bug or without: what a user sees of it."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from hlat.checkpoint import store
from hlat.config.run import Config
from hlat.data.loader import Loader, merge_states, open_loader
from hlat.engine.create import create_engine
from hlat.engine.interface import Engine
from hlat.parallelism.group import tell
from hlat.schedule import rate_at
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
            pending = engine.train_step(loader.next(), rate_at(step, config))
            found.append(engine.read(pending).loss)
        loader.close()
        engine.close()
    return found


def _restarted(config: Config, engine: Engine, loader: Loader) -> Loader:
    """The engine's state through the store, and a new loader where the old one was."""
    world = engine.world
    everyone = world.everyone
    states: list[Any] = everyone.collect([world.dp_rank, loader.state()])
    state = tell(everyone, merge_states([*dict(states).values()]) if everyone.leads else None)
    loader.close()
    made = tempfile.mkdtemp() if everyone.leads else None
    folder = Path(tell(everyone, made))
    path = store.save(folder, 1, engine.chunks(), {}, world.rank, everyone)
    assert isinstance(path, Path)
    store.restore(path, engine.chunks())
    again = _open(config, engine)
    again.restore(state)
    return again


def _open(config: Config, engine: Engine) -> Loader:
    share = engine.world.share
    return open_loader(config.data, config.phase, config.batch, config.run.seed, *share)
