"""Measure the processor time of a run of one step besides its imports, evaluation and step.

Usage: PYTHONPATH=. python benchmarks/start/run.py [--before CHECKOUT] [--rounds 10]
(prints a table, writes result.json and the table in README.md)

Checkouts alternate. `start` is the time from the command to the first step without the import of
torch and the first evaluation, and `end` that of the last save and the report without the import of
matplotlib, which is measured in the same round. The data is opened in the start.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, spread, table, write_between

HERE = Path(__file__).resolve().parent
MATPLOTLIB = """
import numpy, time
start = time.process_time()
import matplotlib.figure, matplotlib.backends.backend_agg, matplotlib.backends.backend_svg
print(time.process_time() - start)
"""
OVERRIDES = ["run.steps=1", "run.name=x", "run.repeat=true", "evaluation.sequences_per_source=8"]


def run_python(arguments: list[str], checkout: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        plugins = Path(folder) / "hydra_plugins"
        plugins.mkdir()
        (plugins / "hlat_launchers").symlink_to(checkout / "launchers")
        environment = {**os.environ, "PYTHONPATH": f"{checkout}:{folder}"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each run compiles all modules
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment, check=True, capture_output=True, text=True
        )
    return done.stdout


def measure(checkout: Path) -> dict[str, float]:
    """Return the processor time of the start and the end of a run."""
    found = json.loads(run_python([str(HERE / "instrumented_run.py"), *OVERRIDES], checkout))
    matplotlib = float(run_python(["-c", MATPLOTLIB], checkout))
    torch, early = found["torch"] - found["python"], found.get("early import of the report", 0.0)
    return {
        "start": found["step started"] - torch - found["first evaluation"] - early,
        "end": found["save"] + found["report"] + early - matplotlib,
        "torch": torch,
        "matplotlib": matplotlib,
        "data": found["data"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    checkouts = {"now": HERE.parent.parent}
    if options.before is not None:
        checkouts["before"] = options.before.resolve()
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for number in range(options.rounds + 1):
        for name, checkout in checkouts.items():
            values = measure(checkout)
            if number:  # the first round fills caches
                measured[name].append(values)
    result: dict[str, Any] = {
        "machine": describe_machine(["torch", "hydra-core", "matplotlib"]),
        "rounds": options.rounds,
        "seconds": {
            name: {key: spread([one[key] for one in rounds]) for key in rounds[0]}
            for name, rounds in measured.items()
        },
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "start", render(result))
    print(render(result))


def render(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    columns = ("start", "end", "torch", "matplotlib", "data")
    rows = [
        [name, *(f"{v['median']:.2f} ({v['min']:.2f} to {v['max']:.2f})" for v in values)]
        for name, found in result["seconds"].items()
        for values in [[found[column] for column in columns]]
    ]
    header = [
        f"processor time in s, median and range of {result['rounds']} rounds",
        *("start", "end", "import of torch", "import of matplotlib", "opening of the data"),
    ]
    return f"{table(header, rows)}\n\n{machine(result)}"


if __name__ == "__main__":
    main()
