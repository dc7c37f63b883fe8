"""Measure the throughput of layouts relative to one process on the same cores.

Usage: python benchmarks/parallel/run.py [--rounds 3] [--steps 30]

Complete runs of `hlat.train` alternate. One process uses all cores, the processes of a layout share
them. Writes result.json and the table of README.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, spread, table, write_between

HERE = Path(__file__).resolve().parent
WARM_UP_STEPS = 8
RUN = [
    "batch.global_batch_size=16",
    "batch.micro_batch_size=4",
    "evaluation.every_steps=null",
    "evaluation.sequences_per_source=1",
    "checkpoint.every_steps=1000",
]
LAYOUTS = {
    "one process": "",
    "dp2": "dp=2",
    "dp2, zero 1": "dp=2 zero=1",
    "dp2, zero 2": "dp=2 zero=2",
    "dp2, zero 3": "dp=2 zero=3",
    "tp2": "tp=2",
    "tp2, sequence parallel": "tp=2 sequence_parallel=true",
    "pp2": "pp=2",
    "pp2, interleaved": "pp=2 pipeline_schedule=interleaved stages_per_rank=2",
    "pp2, zero bubble": "pp=2 pipeline_schedule=zero_bubble stages_per_rank=2",
    "tp2 x pp2": "tp=2 pp=2",
    "tp2 x pp2 x dp2, zero 1": "tp=2 pp=2 dp=2 zero=1",
}


def tokens_per_second(layout: str, steps: int) -> float:
    """Return the median of one run after the warm-up steps."""
    settings = [f"parallelism.{setting}" for setting in layout.split()]
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", "hlat.train", *RUN, *settings]
        command += [f"run.steps={steps}", f"run.root={root}", "run.name=run"]
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(root) / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][WARM_UP_STEPS:]
    return statistics.median(row["tokens_per_second"] for row in rows)


def render(result: dict[str, Any]) -> str:
    """Return the table of README.md."""
    lines = [
        [
            row["layout"],
            f"{row['tokens_per_second']['median']:,.0f}",
            "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["ratio"]),
        ]
        for row in result["rows"]
    ]
    header = ["layout", "tokens per second", "relative to one process"]
    return f"{table(header, lines)}\n\n{machine(result)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=HERE / "result.json")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for _ in range(arguments.rounds):
        for name, layout in LAYOUTS.items():
            found[name].append(tokens_per_second(layout, arguments.steps))
            print(name, round(found[name][-1]), flush=True)
    single = found["one process"]
    rows: list[dict[str, Any]] = [
        {
            "layout": name,
            "settings": LAYOUTS[name],
            "tokens_per_second": spread(values),
            "ratio": spread([value / base for value, base in zip(values, single, strict=True)]),
        }
        for name, values in found.items()
    ]
    result = {
        "machine": describe_machine(["torch"]),
        "protocol": {"rounds": arguments.rounds, "steps": arguments.steps, "run": RUN},
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "layouts", render(result))


if __name__ == "__main__":
    main()
