"""Operations of the local launcher and of checkpoints that are no commands, for `studies.py`.

Usage: python -m benchmarks.scale.study_operations NAME SIZE DIRECTORY
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scale.study_inputs import RUN_NAME
from hlat.config.compose import compose_config, import_launcher_module
from hlat.config.resolve import resolve_config
from hlat.tracking import sweep_log

_NUM_STEPS, _PROGRESS_INTERVAL = 20, 10


def log_local_sweep(size: int, directory: Path) -> None:
    """Log and print the points of a sweep as the local launcher does, with rows of metrics."""
    sweep_points = import_launcher_module("_sweep_points")
    console_module = import_launcher_module("local._sweep_console")
    sweep_dir, tasks = directory / "sweep", []
    for number, point in enumerate(_build_points(size, directory)):
        tasks.append(console_module.SweepTask(number, point, sweep_dir / f"{number}.log"))
        sweep_points.record_point(sweep_dir, number, point, point.run_dir)
    console = console_module.SweepConsole(tasks, size)
    for task in tasks:
        console.print_start(task)
        task.point.run_dir.mkdir(parents=True)
        for step in (1, _NUM_STEPS):
            row = json.dumps({"step": step, "loss": 2.5})
            (task.point.run_dir / "metrics.jsonl").write_text(f"{row}\n")
            console._last_update = 0.0  # a second later
            console.print_progress([task], size - task.number - 1)
        console.print_end(task, 0, 1.0)
    assert len(sweep_log.list_run_dirs(sweep_dir)) == size


def list_stopped_points(size: int, directory: Path) -> None:
    """Log points that are not trained, and list them as the report of the sweep does."""
    sweep_dir = directory / "sweep"
    for number in range(size):
        words = [f"run.seed={number % 10}", f"optimizer.lr={1 + number // 10}e-4"]
        sweep_log.log_point(sweep_dir, number, directory / f"runs/{number}", words, {})
        sweep_log.log_stopped_point(sweep_dir, words, "worse by 0.1 with 3 seeds, p=0.01")
    assert len(sweep_log.list_stopped_points(sweep_dir)) == size
    assert not sweep_log.list_skipped_points(sweep_dir)
    assert sweep_log.count_seeds(sweep_dir) == min(size, 10)


def find_newest_checkpoint(size: int, directory: Path) -> None:
    """Select the checkpoint from which a run resumes."""
    from hlat.checkpoint.checkpoint_lookup import find_checkpoint

    path, problems = find_checkpoint(directory / RUN_NAME, None)
    assert path.name == f"step_{_NUM_STEPS + size // 4 - 1:08d}", path
    assert not problems


def _build_points(size: int, directory: Path) -> list[Any]:
    """Return points with other names and seeds; composing them is a part of another operation."""
    sweep_points = import_launcher_module("_sweep_points")
    config = resolve_config(
        compose_config([f"run.root={directory}/runs", f"run.steps={_NUM_STEPS}"])
    )
    points = []
    for number in range(size):
        run = replace(config.run, name=f"tiny-{number:08x}", seed=number)
        words = ["model=tiny", f"run.seed={number}"]
        points.append(sweep_points.SweepPoint(words, replace(config, run=run), b"", None))
    return points


OPERATIONS: dict[str, Callable[[int, Path], None]] = {
    "local_log": log_local_sweep,
    "local_stopped": list_stopped_points,
    "checkpoint_newest": find_newest_checkpoint,
}


def main(argv: list[str]) -> None:
    name, size, directory = argv
    OPERATIONS[name](int(size), Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])
