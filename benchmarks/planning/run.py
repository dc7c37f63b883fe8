"""Compare the planner's memory with the peak of runs of the native engine on this machine.

Usage: PYTHONPATH=. python benchmarks/planning/run.py

The processes of a layout run two steps, and the maximum over ranks counts. Writes result.json and
the table of README.md.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, table, write_between
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.plan.memory_estimate import estimate_memory

HERE = Path(__file__).resolve().parent
MODEL = [
    "model.num_layers=8",
    "model.hidden_size=512",
    "model.intermediate_size=1408",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=4",
    "model.vocab_size=8192",
    "batch.sequence_length=512",
    "batch.global_batch_size=8",
    "batch.micro_batch_size=2",
    "checkpoint.asynchronous=false",
    "schedule.warmup_steps=1",
]
LAYOUTS = {
    "one process, fp32": "",
    "one process, bf16_sr, selective": "precision=bf16_sr activation_checkpointing=selective",
    "one process, mixed, full": "precision=mixed activation_checkpointing=full",
    "dp2, zero 1, mixed": "precision=mixed dp=2 zero=1",
    "dp2, zero 2, fp32": "dp=2 zero=2",
    "tp2, fp32": "tp=2",
    "tp2, sequence parallel, mixed": "precision=mixed tp=2 sequence_parallel=true",
    "pp2, fp32": "pp=2",
    "tp2 x pp2, sequence parallel, mixed, selective": (
        "precision=mixed tp=2 pp=2 sequence_parallel=true activation_checkpointing=selective"
    ),
}
TOLERANCE = 0.1


def build_overrides(layout: str) -> list[str]:
    """Return the overrides of hlat.train."""
    settings = layout.split()
    return MODEL + [
        setting if setting.startswith("precision=") else f"parallelism.{setting}"
        for setting in settings
    ]


def measure_memory(overrides: list[str], num_processes: int) -> int:
    """Return the maximum over ranks in bytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(num_processes):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
        endpoint = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, str(HERE / "measure.py"), *overrides]
        environment = {**os.environ, **ranks, **endpoint, **memory, **threads}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate()[0] for process in processes]
    return max(json.loads(output.splitlines()[-1]) for output in outputs)


def render(result: dict[str, Any]) -> str:
    """Return the table of README.md."""
    rows = [
        [
            row["layout"],
            f"{row['predicted'] / 2**20:,.0f}",
            f"{row['measured'] / 2**20:,.0f}",
            f"{row['predicted'] / row['measured'] - 1:+.1%}",
        ]
        for row in result["rows"]
    ]
    header = ["layout", "predicted, MiB", "measured, MiB", "error"]
    return f"{table(header, rows)}\n\n{machine(result)}"


def main() -> None:
    rows = []
    for name, layout in LAYOUTS.items():
        overrides = build_overrides(layout)
        config = resolve_config(compose_config(overrides))
        estimate = estimate_memory(config)
        peak = measure_memory(overrides, config.num_processes)
        rows.append(
            {
                "layout": name,
                "settings": layout,
                "terms": asdict(estimate),
                "predicted": estimate.total - estimate.process,  # increase by the build and steps
                "measured": peak,
            }
        )
        predicted = rows[-1]["predicted"] / 2**20
        print(f"{name}: {predicted:.0f} MiB, {peak / 2**20:.0f} measured", flush=True)
    result = {"machine": describe_machine(["torch"]), "run": MODEL, "rows": rows}
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "memory", render(result))


if __name__ == "__main__":
    main()
