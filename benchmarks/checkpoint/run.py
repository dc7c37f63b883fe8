"""Measure how long a save stops training, for hlat and torch.distributed.checkpoint.async_save.

    PYTHONPATH=. python benchmarks/checkpoint/run.py [--models tiny,160m] [--repetitions 10]

The contestants save alternately between two training steps of one engine, and training continues
until the save is durable. `stall` is the duration of the call that starts a save, `save` the time
from this call until it is durable.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hydra import compose, initialize_config_dir

from benchmarks.common import describe_machine, machine, spread, table, write_between
from hlat.checkpoint.checkpointer import Checkpointer
from hlat.checkpoint.training_state import TrainingState
from hlat.config import compose as composition
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine
from hlat.recovery.replica_verification import verify_replicas

HERE = Path(__file__).resolve().parent
SEQUENCES = {"tiny": (32, 256), "160m": (2, 128)}
"""Number and length of the sequences of a step, for a step of less than a second."""


class Loader:
    """Data loader that has not read anything."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": 0, "fingerprint": {}, "chapters": [], "streams": {}}

    def compute_ledger_by_stage(self, state_dict: Any) -> list[Any]:
        return []

    def epoch_warnings(self, state_dict: Any) -> list[str]:
        return []


class Tracker:
    """Tracker that stores events in a list."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def log_event(self, event: str, step: int, **details: Any) -> None:
        self.events.append({"event": event, "step": step, **details})

    def print_message(self, text: str) -> None:
        print(text, file=sys.stderr)

    def exclude_time(self, since: float) -> float:
        return time.perf_counter() - since

    def sync(self) -> None:
        """Return at once, because events are in memory."""


class Ours:
    """hlat's checkpointer, as in a run."""

    def __init__(self, config: Config, folder: Path, engine: NativeEngine) -> None:
        self._tracker = Tracker()
        self._checkpointer = Checkpointer(
            config,
            folder,
            engine,
            Loader(),  # type: ignore[arg-type]
            self._tracker,  # type: ignore[arg-type]
            verify_replicas,
        )
        self._step = 0

    def save(self) -> Callable[[], bool]:
        self._step += 1
        self._checkpointer.save(TrainingState(self._step))
        return self._is_done

    def _is_done(self) -> bool:
        self._checkpointer.log_finished_save()
        last = self._tracker.events[-1]
        assert last["event"] != "checkpoint_failed", last
        return last["event"] == "checkpoint" and last["step"] == self._step


class Dcp:
    """torch.distributed.checkpoint.async_save, with its thread and its copy of the state."""

    def __init__(self, config: Config, folder: Path, engine: NativeEngine) -> None:
        self._folder, self._engine = folder / "dcp", engine

    def save(self) -> Callable[[], bool]:
        state = {shard.name: shard.tensor.detach() for shard in self._engine.state_shards()}
        shutil.rmtree(self._folder, ignore_errors=True)
        future: Any = dcp.async_save(state, checkpoint_id=str(self._folder))
        return lambda: bool(future.done())


CONTESTANTS: dict[str, type[Ours | Dcp]] = {"hlat": Ours, "DCP async_save": Dcp}


def measure(model: str, repetitions: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of stall and save of each contestant, and their ratio."""
    config = _config(model)
    engine = NativeEngine()
    engine.build(config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.model.vocab_size, SEQUENCES[model], np.int32)

    def train() -> float:
        start = time.perf_counter()
        engine.read_metrics(engine.train_step(PackedSequences(tokens), 1e-4))
        return time.perf_counter() - start

    contestants = {name: create(config, folder, engine) for name, create in CONTESTANTS.items()}
    undisturbed = [train() for _ in range(8)][3:]
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):  # the first is a warm-up
        for name, contestant in contestants.items():
            start = time.perf_counter()
            is_done = contestant.save()
            stall = time.perf_counter() - start
            steps = [train()]
            while not is_done():
                steps.append(train())
            if repetition:
                rows[name].append((stall, time.perf_counter() - start, sum(steps) / len(steps)))
        print(f"{model}: {repetition} of {repetitions}", file=sys.stderr)
    size = sum(c.tensor.numel() * c.tensor.element_size() for c in engine.state_shards())
    engine.close()
    results = {
        name: {
            "stall_s": spread([stall for stall, _, _ in values]),
            "save_s": spread([save for _, save, _ in values]),
            "share": spread([stall / save for stall, save, _ in values]),
            "step_s": spread([step for _, _, step in values]),
        }
        for name, values in rows.items()
    }
    return {"bytes": size, "undisturbed_step_s": spread(undisturbed), "contestants": results}


def _config(model: str) -> Config:
    sequences, length = SEQUENCES[model]
    composition.register_configs()
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        return resolve_config(
            compose(
                "config",
                [
                    f"model={model}",
                    f"batch.global_batch_size={sequences}",
                    f"batch.micro_batch_size={sequences}",
                    f"batch.sequence_length={length}",
                    "checkpoint.keep_last=1",
                ],
            )
        )


def render(result: dict[str, Any]) -> str:
    """Return the table of README.md."""
    rows = []
    for model, found in result["models"].items():
        for name, values in found["contestants"].items():
            share = values["share"]
            rows.append(
                [
                    f"{model}, {found['bytes'] / 1e6:,.0f} MB: {name}",
                    f"{values['stall_s']['median'] * 1e3:,.0f} ms",
                    f"{values['save_s']['median']:.2f} s",
                    f"{share['median']:.1%} ({share['min']:.1%} to {share['max']:.1%})",
                    f"{values['step_s']['median'] / found['undisturbed_step_s']['median']:.2f}",
                ]
            )
    header = ["state", "stall", "until durable", "share", "step during a save / without"]
    return f"{table(header, rows)}\n\n{machine(result)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="tiny,160m")
    parser.add_argument("--repetitions", type=int, default=10)
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    models = {}
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            models[model] = measure(model, arguments.repetitions, Path(folder))
    result = {"machine": describe_machine(["torch"]), "models": models}
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    write_between(HERE / "README.md", "table", render(result))
    print(render(result))


if __name__ == "__main__":
    main()
