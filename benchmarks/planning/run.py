"""Compare the planner's memory with the peak of runs of the native engine on this machine.

Usage: PYTHONPATH=. python benchmarks/planning/run.py [NAME ...]

With names, only these layouts run. The others have the memory of an earlier measurement.
The processes of a layout run two steps, and the maximum over ranks counts. Writes result.json and
the table of README.md.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, table, write_between
from hlat.config.compose import compose_config
from hlat.config.parallelism import ParallelismConfig
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
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
MOE = (
    "model.mlp.kind=moe model.mlp.moe.num_experts=4 model.mlp.moe.experts_per_token=2 "
    "model.mlp.moe.intermediate_size=704"
)
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
    "pp4, fp32, eight micro batches": "pp=4 batch.micro_batch_size=1",
    "pp2, mixed, 16 micro batches": (
        "precision=mixed pp=2 batch.micro_batch_size=1 batch.global_batch_size=16"
    ),
    "pp2, interleaved, mixed": (
        "precision=mixed pp=2 pipeline_schedule=interleaved stages_per_rank=2 "
        "batch.micro_batch_size=1"
    ),
    "pp2, zero bubble, fp32": (
        "pp=2 pipeline_schedule=zero_bubble stages_per_rank=2 batch.micro_batch_size=1"
    ),
    "dp2, zero 3, mixed": "precision=mixed dp=2 zero=3",
    "dp2, zero 3, bf16, full": "precision=bf16 dp=2 zero=3 activation_checkpointing=full",
    "dp4, zero 3, two replicas, mixed": (
        "precision=mixed dp=4 zero=3 dp_replicate=2 batch.global_batch_size=16"
    ),
    "dp4, zero 1, two replicas, bf16_sr": (
        "precision=bf16_sr dp=4 zero=1 dp_replicate=2 batch.global_batch_size=16"
    ),
    "tp2 x dp2, zero 1, bf16_sr_master": "precision=bf16_sr_master tp=2 dp=2 zero=1",
    "one process, Muon, bf16_sr": "precision=bf16_sr optimizer=muon",
    "one process, SOAP, fp32": "optimizer=soap",
    "one process, Lion, average of the weights, fp32": "optimizer=lion optimizer.ema_decay=0.99",
    "one process, 2,048 tokens, mixed, selective": (
        "precision=mixed activation_checkpointing=selective batch.sequence_length=2048 "
        "batch.global_batch_size=2 batch.micro_batch_size=1"
    ),
    "one process, QK-norm and tied embeddings, mixed": (
        "precision=mixed model.attention.qk_norm=true model.tie_embeddings=true"
    ),
    "one process, experts, fp32": MOE,
    "dp2, zero 1, experts, mixed": f"precision=mixed dp=2 zero=1 {MOE}",
    "dp2, zero 1, equal experts, mixed": f"precision=mixed dp=2 zero=1 {MOE} --equal-experts",
    "ep2 x dp2, experts, mixed": f"precision=mixed dp=2 ep=2 zero=1 {MOE}",
    "ep2 x dp2, equal experts, mixed": f"precision=mixed dp=2 ep=2 zero=1 {MOE} --equal-experts",
}
TOLERANCE = 0.1


def build_overrides(layout: str) -> list[str]:
    """Return the overrides of hlat.train."""
    names = {field.name for field in fields(ParallelismConfig)}
    return MODEL + [
        f"parallelism.{setting}" if setting.split("=")[0] in names else setting
        for setting in layout.split()
    ]


def load_config(overrides: list[str]) -> Config:
    """Return the configuration, without options of measure.py."""
    words = [word for word in overrides if not word.startswith("--")]
    return resolve_config(compose_config(words))


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


def describe(name: str, measured: int) -> dict[str, Any]:
    """Return the terms of the prediction, its sum and the measured memory of a layout."""
    estimate = estimate_memory(load_config(build_overrides(LAYOUTS[name])))
    return {
        "layout": name,
        "settings": LAYOUTS[name],
        "terms": asdict(estimate),
        "predicted": estimate.total - estimate.process,  # increase by the build and steps
        "measured": measured,
    }


def main(names: list[str]) -> None:
    file = HERE / "result.json"
    result = json.loads(file.read_text())
    measured = {row["layout"]: row["measured"] for row in result["rows"]}
    for name in names or LAYOUTS:
        overrides = build_overrides(LAYOUTS[name])
        num_processes = load_config(overrides).num_processes
        measured[name] = measure_memory(overrides, num_processes)
        print(f"{name}: {measured[name] / 2**20:.0f} MiB", flush=True)
    rows = [describe(name, measured[name]) for name in LAYOUTS if name in measured]
    result = {"machine": describe_machine(["torch"]), "run": MODEL, "rows": rows}
    file.write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "memory", render(result))


if __name__ == "__main__":
    main(sys.argv[1:])
