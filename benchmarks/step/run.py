"""Measure the tokens per second of a training step, for hlat and its peers.

Usage: python benchmarks/step/run.py [--device cuda] [--shapes small,qwen3_tiny] [--rounds 5]
    [--only TEXT ...]

Each contestant has a separate process (measure.py). Those of one shape and recipe run at the same
time and alternate after some steps, so that other load of the machine affects all of them. Ratios
are computed within a round. All contestants have the same initial weights, and their first losses
must agree. On an accelerator they run one after the other, because they would share its memory.
The cache of compilers is empty. Writes result.json, or replaces rows of it.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from contestants import CONTESTANTS, OPTIONAL, list_contestants, make_settings

from benchmarks.common import describe_machine, spread
from hlat.model.decoder_spec import compute_flops_per_token

HERE = Path(__file__).resolve().parent
LIBRARIES = ["torch", "transformers", "litgpt", "numpy"]
RECIPES = ["fp32", "bf16", "mixed"]
MATMUL = "matmul"
"""The fastest matmul of the machine, measured in each round."""
LIMIT = "limit"
"""Start of the names of contestants that compute a part of an eager step (limit.py,
step_operators.py); compared with the best eager peer."""
LOSS_TOLERANCES = {"fp32": 1e-5, "bf16": 5e-3, "mixed": 5e-3, "bf16_sr": 5e-3}
"""Maximum relative difference of the first loss to ours; litgpt's loss has 8 bits in bf16."""
Entry = tuple[str, str, str, str]
Runs = dict[Entry, list[dict[str, Any]]]
KEYS = ("contestant", "shape", "recipe", "device")


class Worker:
    """Process of measure.py."""

    def __init__(self, entry: Entry, seconds: float, cache: str) -> None:
        name, shape, recipe, device = entry
        request = {"name": name, "shape": shape, "recipe": recipe, "device": device}
        environment = os.environ | {
            "PYTHONPATH": str(HERE.parent.parent),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": cache,
            **CONTESTANTS.get(name, ("", {}))[1].get("environment", {}),
        }
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  used until the process ends
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "measure.py"), json.dumps(request | {"seconds": seconds})],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.started = self.read_result()

    def train(self) -> dict[str, Any]:
        """Train for an interval and return the result."""
        self.start_interval()
        return self.read_result()

    def start_interval(self) -> None:
        """Start an interval of training, unless the process has ended."""
        if self.process.poll() is None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def read_result(self) -> dict[str, Any]:
        """Return the next result, or the last line of the error message."""
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self.log.seek(0)
        return {"failure": (self.log.read().strip().splitlines() or ["killed"])[-1]}

    def close(self) -> None:
        """Close the standard input and wait for the end of the process."""
        self.process.stdin.close()
        self.process.wait()


def run_rounds(entries: list[Entry], rounds: int, seconds: float, cache: str) -> Runs:
    """Start the processes of all entries one after the other, then alternate them."""
    workers = {}
    for entry in entries:
        workers[entry] = Worker(entry, seconds, cache)
        print("started", *entry, workers[entry].started, flush=True)
    runs: Runs = {entry: [worker.started] for entry, worker in workers.items()}
    compare_losses(runs)
    for repetition in range(rounds):
        for entry, worker in workers.items():
            runs[entry].append(worker.train())
            print(repetition, *entry, runs[entry][-1], flush=True)
    for worker in workers.values():
        worker.close()
    return runs


def compare_losses(runs: Runs) -> None:
    """Raise ValueError if the first losses of one shape and recipe differ."""
    losses = {
        entry: started["first_loss"]
        for entry, (started, *_) in runs.items()
        if "first_loss" in started
    }
    reference = next((loss for entry, loss in losses.items() if entry[0] == "ours"), None)
    for entry, loss in losses.items():
        if reference and abs(loss / reference - 1) > LOSS_TOLERANCES[entry[2]]:
            raise ValueError(f"first loss of {entry} is {loss}; ours is {reference}")


def measure(entries: list[Entry], rounds: int, seconds: float, cache: str) -> Runs:
    """Run all entries at the same time on a CPU, and one after the other on accelerators."""
    device = entries[0][-1]
    groups = [entries] if device == "cpu" else [[entry] for entry in entries]
    runs: Runs = {}
    for group in groups:
        runs |= run_rounds(group, rounds, seconds, cache)
    return runs


def flops(entry: Entry) -> float:
    """Return the training FLOPs per token of an entry's shape."""
    config = make_settings(*entry).config
    return compute_flops_per_token(config.model, config.batch.sequence_length)


def summarise(entry: Entry, runs: Runs, reference: str) -> dict[str, Any]:
    """Return the row of an entry: spreads over the rounds, and ratios within them."""
    row: dict[str, Any] = dict(zip(KEYS, entry, strict=True))
    started, *intervals = runs[entry]
    failures = [run["failure"] for run in runs[entry] if "failure" in run]
    if failures:
        return row | {"failure": failures[-1]}
    row |= {key: round(value, 3) for key, value in started.items()}
    row |= {key: spread([interval[key] for interval in intervals]) for key in intervals[0]}
    if entry[0] == MATMUL:
        return row
    for key in ("tokens_per_second", "tokens_per_cpu_second"):
        if found := find_finished([(reference, *entry[1:])], runs):
            row[f"{key}_ratio"] = compute_ratio(intervals, found[0], key)
        if entry[0].startswith(("ours", LIMIT)) and (
            peers := find_finished(list_peers(entry, runs), runs)
        ):
            best = max(peers, key=lambda peer: statistics.median(one[key] for one in peer))
            row[f"{key}_best_peer_ratio"] = compute_ratio(intervals, best, key)
    matmuls = runs[(MATMUL, *entry[1:])][1:]
    second = "cpu_second" if entry[-1] == "cpu" else "second"
    flops_per_token = flops(entry)
    mfu = [
        flops_per_token * interval[f"tokens_per_{second}"] / matmul[f"flops_per_{second}"]
        for interval, matmul in zip(intervals, matmuls, strict=True)
    ]
    return row | {"mfu": spread(mfu)}


def list_peers(entry: Entry, runs: Runs) -> list[Entry]:
    """Return the other trainers in the same mode, eager or compiled."""
    return [
        other
        for other in runs
        if other[1:] == entry[1:]
        and other[0] != MATMUL
        and not other[0].startswith(("ours", LIMIT))
        and ("compiled" in other[0]) == ("compiled" in entry[0])
    ]


def find_finished(entries: list[Entry], runs: Runs) -> list[list[dict[str, Any]]]:
    """Return the intervals of the entries that have run without a failure."""
    finished = [runs[entry] for entry in entries if entry in runs]
    return [run[1:] for run in finished if not any("failure" in interval for interval in run)]


def compute_ratio(
    intervals: list[dict[str, Any]], peers: list[dict[str, Any]], key: str
) -> dict[str, float]:
    """Return the spread of the ratio to a peer, in each round."""
    return spread([one[key] / peer[key] for one, peer in zip(intervals, peers, strict=True)])


def is_selected(name: str, only: list[str]) -> bool:
    """Return True if a contestant that is measured by default contains a string of `only`."""
    return name not in OPTIONAL and any(part in name for part in only)


def read_rows(path: Path) -> dict[Entry, dict[str, Any]]:
    """Return the rows of an earlier call by entry."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {tuple(row[key] for key in KEYS): row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["tiny", "small"],
        help="shapes of contestants.py or presets of conf/model, separated by commas or spaces",
    )
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="contestants whose name contains one of these"
    )
    parser.add_argument("--reference", default="transformers", help="contestant of the ratios")
    parser.add_argument("--exact", action="store_true", help="... or is one of these")
    parser.add_argument("--output", type=Path, default=HERE / "result.json")
    arguments = parser.parse_args()
    only = arguments.only
    shapes = [shape for shapes in arguments.shapes for shape in shapes.split(",")]
    rows = read_rows(arguments.output)
    with tempfile.TemporaryDirectory() as cache:
        for shape, recipe in itertools.product(shapes, arguments.recipes):
            names = [
                name
                for name in list_contestants(shape, recipe)
                if (name in only if arguments.exact else is_selected(name, only))
            ]
            entries = [(name, shape, recipe, arguments.device) for name in [MATMUL, *names]]
            runs = measure(entries, arguments.rounds, arguments.seconds, cache)
            rows |= {entry: summarise(entry, runs, arguments.reference) for entry in entries}
    protocol = {"rounds": arguments.rounds, "seconds": arguments.seconds}
    result = {
        "machine": describe_machine(LIBRARIES),
        "protocol": protocol,
        "rows": [*rows.values()],
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
