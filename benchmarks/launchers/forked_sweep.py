"""Measure a sweep of forked runs on this machine, and the same runs as separate commands.

Usage: PYTHONPATH=. python benchmarks/launchers/forked_sweep.py [--runs 100] [--steps 20] [--jobs 2]
(prints a table, writes forked_sweep.json and the table in README.md; about 25 minutes on two cores)

The runs are those of the default model with other seeds. `work` is the time of the steps, waits for
data, evaluations and saves that the runs record, divided by the number of concurrent runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, table, write_between
from hlat.study.run_record import load_run_record

HERE = Path(__file__).resolve().parent
WORK = ("steps", "data_wait", "evaluation", "checkpoint")
COMMAND = [sys.executable, "-m", "hlat"]


def build_overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides of all runs."""
    return [
        f"run.steps={options.steps}",
        f"evaluation.sequences_per_source={options.sequences}",
        f"checkpoint.every_steps={options.steps}",
    ]


def run_sweep(folder: Path, options: argparse.Namespace) -> None:
    seeds = ",".join(str(seed) for seed in range(1, options.runs + 1))
    words = [f"run.seed={seeds}", f"hydra.launcher.jobs={options.jobs}"]
    subprocess.run(
        [*COMMAND, "sweep", *build_overrides(options), *words],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def run_commands(folder: Path, options: argparse.Namespace) -> None:
    """Start one command per run, as many at a time, with the threads that the launcher assigns."""
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    def run(seed: int) -> None:
        command = [*COMMAND, "train", *build_overrides(options), f"run.seed={seed}"]
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, range(1, options.runs + 1)))


def measure(action: Callable[[Path, argparse.Namespace], None], options: Any) -> dict[str, Any]:
    """Return seconds, and the losses of all runs by seed."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        action(Path(folder), options)
        wall = time.perf_counter() - start
        paths = [path.parent for path in Path(folder).glob("runs/*/metrics.jsonl")]
        records = [load_run_record(path) for path in paths]
    assert len(records) == options.runs, f"{len(records)} of {options.runs} runs"
    work = sum(sum(record.time_ledger.seconds[key] for key in WORK) for record in records)
    return {
        "wall_s": round(wall, 2),
        "work_s": round(work / options.jobs, 2),
        "losses": {
            record.parsed_config.run.seed: [row["loss"] for row in record.metrics]
            for record in records
            if record.parsed_config is not None
        },
    }


def render(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    label = f"{result['runs']} runs of {result['steps']} steps, {result['jobs']} at a time"
    names = ("one sweep", "separate commands")
    columns = ("wall_s", "work_s")
    rows = [
        [
            name,
            *(f"{result[name][column]:.1f}" for column in columns),
            f"{result[name]['wall_s'] / result[name]['work_s']:.2f}",
        ]
        for name in names
    ]
    header = [label, "wall time, s", "work, s", "wall time / work"]
    return f"{table(header, rows)}\n\n{machine(result)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=8, help="held-out sequences per source")
    parser.add_argument("--output", type=Path, default=HERE / "forked_sweep.json")
    options = parser.parse_args()
    sweep, commands = measure(run_sweep, options), measure(run_commands, options)
    losses = sweep.pop("losses"), commands.pop("losses")
    assert losses[0] == losses[1], "the losses differ"
    result = {
        "machine": describe_machine(["torch", "hydra-core"]),
        **{key: getattr(options, key) for key in ("runs", "steps", "jobs", "sequences")},
        "one sweep": sweep,
        "separate commands": commands,
        "losses_are_equal": True,
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "forked_sweep", render(result))
    print(render(result))


if __name__ == "__main__":
    main()
