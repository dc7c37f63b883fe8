"""Trials that save the state of an engine, restore it in another and save it again.

One engine trains. After each of its steps its state is saved; another engine, whose tensors were
filled with noise, and a new loader restore it and save it too. Both checkpoints must have the same
bytes, and both engines must find the same loss in the next step, whose batch each draws itself.
"""

import os
import random
import shutil
from pathlib import Path

from hydra import compose, initialize_config_dir

from hlat.checkpoint import checkpoint_directory, checkpoint_store
from hlat.config import compose as composition
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.data.data_loader import DataLoader, build_data_loader, merge_state_dicts
from hlat.engine.interface import Engine
from hlat.engine.native.native_engine import NativeEngine
from hlat.training_state import TrainingState
from tests.faults.trials import SMALL, Place

RECIPES = ("fp32", "bf16_sr", "mixed")
RATE = 1e-3
TRIPS_PER_CALL = 20


class Side:
    """An engine with a loader and the state that both are in."""

    def __init__(self, config: Config, place: Path) -> None:
        self._config, self._place = config, place
        self.engine: Engine = NativeEngine()
        self.engine.build(config)
        self._loader = self._open()
        self.state = TrainingState()

    def train(self) -> float:
        """One step; returns its loss."""
        pending = self.engine.train_step(self._loader.next_batch(), RATE)
        self.state = self.state.after_step(self._config.batch.tokens_per_step)
        return self.engine.read(pending).loss

    def save(self) -> Path:
        """Save all, in a folder that held another step before."""
        step = self.state.step
        told = self.state.to_json() | {"data": merge_state_dicts([self._loader.state_dict()])}
        for old in self._place.glob("step_*"):
            checkpoint_directory.remove_checkpoint(old)
        return Path(
            str(checkpoint_store.save_checkpoint(self._place, step, self.engine.chunks(), told))
        )

    def restore(self, path: Path) -> None:
        """Forget everything and take what another has saved."""
        for chunk in self.engine.chunks():
            chunk.tensor.copy_(chunk.tensor.new_empty(chunk.tensor.shape).random_(0, 99))
        self._loader.close()
        self._loader = self._open()
        checkpoint_store.verify_checkpoint(path)
        checkpoint_store.load_checkpoint(path, self.engine.chunks())
        self.state = TrainingState.from_json(checkpoint_store.load_state_json(path))
        self._loader.load_state_dict(self.state.data)

    def close(self) -> None:
        """End both."""
        self._loader.close()
        self.engine.close()

    def _open(self) -> DataLoader:
        config = self._config
        return build_data_loader(config.data, config.phase, config.batch, config.run.seed)


def configuration(corpus: Path, recipe: str) -> Config:
    """The small run of all trials."""
    composition.register_configs()
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        words = [*SMALL, f"data.root={corpus}", f"precision={recipe}"]
        return resolve_config(compose("config", words))


def move_state(place: Place, recipe: str, lot: random.Random) -> list[str]:
    """Move the state of each step to another engine; compare the bytes and the next loss."""
    config = configuration(place.folder / "corpus", recipe)
    folder = place.folder / f"trips-{recipe}"
    shutil.rmtree(folder, ignore_errors=True)
    here, there = Side(config, folder / "here"), Side(config, folder / "there")
    outcomes = []
    try:
        for _ in range(place.limit(TRIPS_PER_CALL)):
            here.train()
            first = here.save()
            there.restore(first)
            same_bytes = contents(first) == contents(there.save())
            problems = [] if same_bytes else [f"{recipe}: other bytes"]
            if there.train() != here.train():
                problems.append(f"{recipe}: another next loss")
            outcomes.append("; ".join(problems))
    finally:
        here.close()
        there.close()
    return outcomes


def contents(path: Path) -> dict[str, bytes]:
    """What the files of a checkpoint hold."""
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}
