"""Measure the peak memory of compiled steps in several processes.

Usage: python benchmarks/step/peak_memory.py     (writes peak_memory.json)

The peak of a process depends on the addresses of the compiler's objects and on garbage collection:
it differs by a tenth between processes of the same contestant. Contestants
alternate, and each process starts with an empty compiler cache.
"""

import argparse
import json
import tempfile
from pathlib import Path

from run import Worker

from benchmarks.common import describe_machine, spread

HERE = Path(__file__).resolve().parent
NAMES = ("ours, compiled", "torchtitan, compiled")
SHAPE, DEVICE = "small", "cpu"


def measure_peak(name: str, recipe: str, seconds: float) -> float:
    """Return the peak memory of steps in a new process in MB, without its first four steps."""
    with tempfile.TemporaryDirectory() as cache:
        worker = Worker((name, SHAPE, recipe, DEVICE), seconds, cache)
        result = worker.train()
        worker.close()
    return result["peak_bytes"] / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=["bf16"])
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=25)
    arguments = parser.parse_args()
    rows = []
    for recipe in arguments.recipes:
        peaks: dict[str, list[float]] = {name: [] for name in NAMES}
        for process in range(arguments.processes):
            for name, values in peaks.items():
                values.append(measure_peak(name, recipe, arguments.seconds))
                print(process, name, recipe, round(values[-1]), flush=True)
        rows += [
            {"contestant": name, "shape": SHAPE, "recipe": recipe, "peak_mb": spread(values)}
            for name, values in peaks.items()
        ]
    result = {"rows": rows, "machine": describe_machine(["torch", "numpy"])}
    (HERE / "peak_memory.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
