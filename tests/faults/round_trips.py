"""Trials that save the state of an engine, restore it in another and save it again.

One engine trains and saves its state after each step. Another engine, filled with noise, and a new
loader restore the state and save it again. Both checkpoints must have the same bytes, and both
engines must compute the same loss in the next step, each with its loader.
"""

import os
import random
import shutil
from pathlib import Path

from hydra import compose, initialize_config_dir

from hlat.checkpoint import checkpoint_directory, checkpoint_store
from hlat.checkpoint.training_state import TrainingState
from hlat.config import compose as composition
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.data.data_loader import DataLoader, build_data_loader, merge_state_dicts
from hlat.engine.interface import Engine
from hlat.engine.native.native_engine import NativeEngine
from tests.faults.trials import SMALL, Workspace

RECIPES = ("fp32", "bf16_sr", "mixed")
RATE = 1e-3
TRIPS_PER_CALL = 20


class EngineWithLoader:
    """Engine, data loader, and their training state."""

    def __init__(self, config: Config, root: Path) -> None:
        self._config, self._root = config, root
        self.engine: Engine = NativeEngine()
        self.engine.build(config)
        self._loader = self._open()
        self.state = TrainingState()

    def train(self) -> float:
        """Train one step and return its loss."""
        pending = self.engine.train_step(self._loader.next_batch(), RATE)
        self.state = self.state.after_step(self._config.batch)
        return self.engine.read_metrics(pending).loss

    def save(self) -> Path:
        """Save everything, in a folder from which an older step is removed."""
        step = self.state.step
        state = self.state.to_json() | {"data": merge_state_dicts([self._loader.state_dict()])}
        for old in self._root.glob("step_*"):
            checkpoint_directory.remove_checkpoint(old)
        return Path(
            str(
                checkpoint_store.save_checkpoint(
                    self._root, step, self.engine.state_shards(), state
                )
            )
        )

    def restore(self, path: Path) -> None:
        """Fill the engine with noise, then load a checkpoint."""
        for shard in self.engine.state_shards():
            shard.tensor.copy_(shard.tensor.new_empty(shard.tensor.shape).random_(0, 99))
        self._loader.close()
        self._loader = self._open()
        checkpoint_store.verify_checkpoint(path)
        checkpoint_store.load_checkpoint(path, self.engine.state_shards())
        self.state = TrainingState.from_json(checkpoint_store.load_state_json(path))
        self._loader.load_state_dict(self.state.data)

    def close(self) -> None:
        """Close the loader and the engine."""
        self._loader.close()
        self.engine.close()

    def _open(self) -> DataLoader:
        config = self._config
        return build_data_loader(config.data, config.phase, config.batch, config.run.seed)


def build_config(corpus: Path, recipe: str) -> Config:
    """Return the configuration of the small run."""
    composition.register_configs()
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        arguments = [*SMALL, f"data.root={corpus}", f"precision={recipe}"]
        return resolve_config(compose("config", arguments))


def move_state(workspace: Workspace, recipe: str, rng: random.Random) -> list[str]:
    """Move the state of each step to another engine; compare the bytes and the next loss."""
    config = build_config(workspace.folder / "corpus", recipe)
    folder = workspace.folder / f"trips-{recipe}"
    shutil.rmtree(folder, ignore_errors=True)
    here = EngineWithLoader(config, folder / "here")
    there = EngineWithLoader(config, folder / "there")
    outcomes = []
    try:
        for _ in range(workspace.limit(TRIPS_PER_CALL)):
            here.train()
            first = here.save()
            there.restore(first)
            same_bytes = read_files(first) == read_files(there.save())
            problems = [] if same_bytes else [f"{recipe}: other bytes"]
            if there.train() != here.train():
                problems.append(f"{recipe}: another next loss")
            outcomes.append("; ".join(problems))
    finally:
        here.close()
        there.close()
    return outcomes


def read_files(path: Path) -> dict[str, bytes]:
    """Return the contents of a checkpoint by file name."""
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}
