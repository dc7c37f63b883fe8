"""Measure steps by the time that waiting OpenMP threads spin, in one process and in two.

Usage: python benchmarks/step/waiting_threads.py     (writes waiting_threads.json)

The spin counts of libgomp alternate after some steps. Each is measured with one process, and with
two processes that train at the same time on the same cores. Ratios are computed within a round.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from contestants import SPINNING
from run import Entry, Worker

from benchmarks.common import describe_machine, spread

HERE = Path(__file__).resolve().parent
NAMES = ("ours", *SPINNING)
SHAPES, RECIPE, DEVICE = ("tiny", "small"), "bf16", "cpu"
KEY = "tokens_per_second"


def measure_interval(workers: list[Worker]) -> float:
    """Return the tokens per second of a process while all of them train."""
    for worker in workers:
        worker.start_interval()
    return min(worker.read_result()[KEY] for worker in workers)


def measure_shape(shape: str, rounds: int, seconds: float, cache: str) -> list[dict[str, Any]]:
    """Return a row for each spin count and number of processes."""
    entries: dict[str, Entry] = {name: (name, shape, RECIPE, DEVICE) for name in NAMES}
    pairs = {
        name: [Worker(entry, seconds, cache) for _ in range(2)] for name, entry in entries.items()
    }
    rates: dict[tuple[str, int], list[float]] = {}
    for repetition in range(rounds):
        for name, pair in pairs.items():
            for count in (1, 2):
                rate = measure_interval(pair[:count])
                rates.setdefault((name, count), []).append(rate)
                print(repetition, shape, name, count, round(rate), flush=True)
    for worker in (worker for pair in pairs.values() for worker in pair):
        worker.close()
    return [
        {
            "contestant": name,
            "shape": shape,
            "processes": count,
            KEY: spread(values),
            "ratio": spread(
                [one / first for one, first in zip(values, rates[NAMES[0], count], strict=True)]
            ),
        }
        for (name, count), values in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        rows = [
            row
            for shape in SHAPES
            for row in measure_shape(shape, arguments.rounds, arguments.seconds, cache)
        ]
    result = {"rows": rows, "machine": describe_machine(["torch", "numpy"])}
    (HERE / "waiting_threads.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
