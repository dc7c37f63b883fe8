"""Loss curve of a short run on one rank, with or without a bug."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from hlat.checkpoint import checkpoint_store
from hlat.config.run import Config
from hlat.data.data_loader import DataLoader, build_data_loader, merge_state_dicts
from hlat.distributed.object_group import broadcast_object
from hlat.engine.engine_factory import create_engine
from hlat.engine.interface import Engine
from hlat.optim.lr_schedule import compute_lr
from tests.distributed.mutants import MUTANTS


def losses(config: Config, mutant: str | None, steps: int, restarts: bool) -> list[float]:
    """Return the loss of each step; with `restarts`, the run resumes after half of the steps."""
    with contextlib.nullcontext() if mutant is None else MUTANTS[mutant]():
        engine = create_engine(config)
        engine.build(config)
        loader = _open(config, engine)
        curve = []
        for step in range(steps):
            if restarts and step == steps // 2:
                loader = _save_and_load(config, engine, loader)
            pending = engine.train_step(loader.next_batch(), compute_lr(step, config))
            curve.append(engine.read_metrics(pending).loss)
        loader.close()
        engine.close()
    return curve


def _save_and_load(config: Config, engine: Engine, loader: DataLoader) -> DataLoader:
    """Save and load the engine's state, and return a new loader with the state of `loader`."""
    parallel = engine.parallel_state
    group = parallel.world_group
    states: list[Any] = group.gather_object([parallel.dp_rank, loader.state_dict()])
    state = broadcast_object(
        group, merge_state_dicts([*dict(states).values()]) if group.is_rank0 else None
    )
    loader.close()
    temporary = tempfile.mkdtemp() if group.is_rank0 else None
    folder = Path(broadcast_object(group, temporary))
    path = checkpoint_store.save_checkpoint(folder, 1, engine.state_shards(), {}, group)
    assert isinstance(path, Path)
    checkpoint_store.load_checkpoint(path, engine.state_shards())
    resumed = _open(config, engine)
    resumed.load_state_dict(state)
    return resumed


def _open(config: Config, engine: Engine) -> DataLoader:
    shard = engine.parallel_state.data_shard
    return build_data_loader(
        config.data, config.phase, config.batch, config.run.resolved_data_seed, *shard
    )
