"""Compare predicted and measured step times of twelve layouts and sizes, after three measured runs.

Usage: PYTHONPATH=. python benchmarks/planning/calibrate.py [--runs DIR]

Trains the runs that `hlat plan calibrate suggest=true` proposes for one model on two processes, and
twelve others, on a machine without other work, in three rounds, of which the fastest run counts.
Writes calibration.json and the table of README.md. Finished runs of DIR are not trained again.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, table, write_between
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.plan.calibration import (
    MeasuredRun,
    calibrate,
    load_measured_run,
    predict_step,
    suggest_runs,
)
from hlat.plan.hardware_efficiency import UNKNOWN_HARDWARE

HERE = Path(__file__).resolve().parent
RUN = (
    "model=tiny hardware=cpu batch.sequence_length=256 batch.global_batch_size=8 "
    "schedule.warmup_steps=1 evaluation.every_steps=null evaluation.tokens_per_source=1024 "
    "checkpoint.every_steps=1000"
)
SUGGESTED_FOR = "6 layers of 192"
SIZES = {
    SUGGESTED_FOR: (6, 192, 512, 6),
    "7 layers of 224": (7, 224, 608, 7),
    "4 layers of 384": (4, 384, 1056, 6),
    "3 layers of 576": (3, 576, 1584, 9),
}
"""Layers, width, MLP and heads."""
LAYOUTS = {
    "7 layers of 224": {
        "one process, full, micro batches of 2": (
            "parallelism.activation_checkpointing=full batch.micro_batch_size=2"
        ),
        "dp2, zero 2, micro batches of 2": (
            "parallelism.dp=2 parallelism.zero=2 batch.micro_batch_size=2"
        ),
        "pp2, selective, micro batches of 2": (
            "parallelism.pp=2 parallelism.activation_checkpointing=selective "
            "batch.micro_batch_size=2"
        ),
        "dp2, 128 tokens": "parallelism.dp=2 batch.sequence_length=128 batch.micro_batch_size=4",
    },
    "4 layers of 384": {
        "one process, 512 tokens, micro batches of 4": (
            "batch.sequence_length=512 batch.micro_batch_size=4"
        ),
        "tp2, micro batches of 8": "parallelism.tp=2 batch.micro_batch_size=8",
        "pp2, interleaved, micro batches of 1": (
            "parallelism.pp=2 parallelism.pipeline_schedule=interleaved "
            "parallelism.stages_per_rank=2 batch.micro_batch_size=1"
        ),
        "dp2, zero 3, micro batches of 4": (
            "parallelism.dp=2 parallelism.zero=3 batch.micro_batch_size=4"
        ),
    },
    "3 layers of 576": {
        "one process, selective, micro batches of 1": (
            "parallelism.activation_checkpointing=selective batch.micro_batch_size=1"
        ),
        "dp2, zero 1, micro batches of 1": (
            "parallelism.dp=2 parallelism.zero=1 batch.micro_batch_size=1"
        ),
        "dp2, full": (
            "parallelism.dp=2 parallelism.activation_checkpointing=full batch.micro_batch_size=4"
        ),
        "pp2, micro batches of 4": "parallelism.pp=2 batch.micro_batch_size=4",
    },
}
NUM_STEPS = 18
ROUNDS = 3
KEYS = ("before_s", "after_s")


def build_overrides(size: str, layout: str) -> list[str]:
    """Return the overrides of hlat train; those of the layout replace those of all runs."""
    layers, width, mlp, heads = SIZES[size]
    words = [
        *RUN.split(),
        f"model.num_layers={layers}",
        f"model.hidden_size={width}",
        f"model.intermediate_size={mlp}",
        f"model.num_attention_heads={heads}",
        f"model.num_key_value_heads={heads}",
        *layout.split(),
    ]
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in words).items()]


def train(root: Path, name: str, overrides: list[str]) -> None:
    """Train a run, unless it has finished."""
    last = root / name / "metrics.jsonl"
    if last.exists() and f'"step": {NUM_STEPS},' in last.read_text():
        return
    steps = [f"run.root={root}", f"run.name={name}", f"run.steps={NUM_STEPS}"]
    subprocess.run(
        [sys.executable, "-m", "hlat", "train", *overrides, *steps],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def train_rounds(root: Path, runs: dict[str, list[str]]) -> dict[str, MeasuredRun]:
    """Train all runs in turn, several times; return the fastest of each, by name."""
    found: dict[str, MeasuredRun] = {}
    for number in range(ROUNDS):
        for name, overrides in runs.items():
            directory = root / f"round_{number}"
            slug = name.replace(" ", "_").replace(",", "")
            train(directory, slug, overrides)
            run = load_measured_run(directory / slug)
            print(f"round {number}, {name}: {run.step_s:.3f} s", flush=True)
            if name not in found or run.step_s < found[name].step_s:
                found[name] = run
    return found


def measure(root: Path) -> dict[str, Any]:
    """Train all runs, and return step times and predictions."""
    base = build_overrides(SUGGESTED_FOR, "parallelism.dp=2")
    suggested, _ = suggest_runs(resolve_config(compose_config(base)), 3)
    runs = {}
    for i, one in enumerate(suggested):
        overrides = dict(word.split("=", 1) for word in [*base, *one.overrides])
        runs[f"suggested {i}"] = [f"{key}={value}" for key, value in overrides.items()]
    layouts = {
        f"{size}, {label}": build_overrides(size, layout)
        for size, layouts in LAYOUTS.items()
        for label, layout in layouts.items()
    }
    measured = train_rounds(root, runs | layouts)
    found = calibrate([measured[name] for name in runs])
    return {
        "machine": describe_machine(["torch"]),
        "suggested": [
            {"overrides": one.overrides, "measured_s": measured[name].step_s}
            for one, name in zip(suggested, runs, strict=True)
        ],
        "factors": found.factors,
        "constants": asdict(replace(found.efficiency, source="")),
        "rows": [
            {
                "layout": name,
                "measured_s": measured[name].step_s,
                "before_s": predict_step(measured[name].config, UNKNOWN_HARDWARE),
                "after_s": predict_step(measured[name].config, found.efficiency),
            }
            for name in layouts
        ],
    }


def render(result: dict[str, Any]) -> str:
    """Return the table of README.md."""
    low, high = result["constants"]["interval"]
    rows = [
        [
            row["layout"],
            f"{row['measured_s']:.3f}",
            *(f"{row[key]:.3f} ({row[key] / row['measured_s'] - 1:+.0%})" for key in KEYS),
        ]
        for row in result["rows"]
    ]
    errors = {
        key: statistics.median(abs(row[key] / row["measured_s"] - 1) for row in result["rows"])
        for key in KEYS
    }
    covered = sum(low <= row["measured_s"] / row["after_s"] <= high for row in result["rows"])
    factors = ", ".join(f"{name} {value:.2f}" for name, value in result["factors"].items())
    summary = (
        f"Median error {errors['before_s']:.1%} before and {errors['after_s']:.1%} after; the 80% "
        f"interval, {low - 1:+.0%} to {high - 1:+.0%}, contains {covered} of {len(rows)} step "
        f"times. Factors: {factors}."
    )
    header = ["layout", "measured, s", "assumed constants, s", "calibrated, s"]
    return f"{table(header, rows)}\n\n{summary}\n\n{machine(result)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path("build/calibration")
    parser.add_argument("--runs", type=Path, default=default, help="directory of the runs")
    result = measure(parser.parse_args().runs.resolve())
    (HERE / "calibration.json").write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "calibration", render(result))


if __name__ == "__main__":
    main()
