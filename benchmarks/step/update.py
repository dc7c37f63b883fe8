"""Nanoseconds that an update of one bf16 weight takes, ours beside others' AdamW.

Usage: python benchmarks/step/update.py [--shape small] [--rounds 10] [--output update.json]

All contestants live in one process, each with weights of its own in the shapes of a model, and take
turns, first on one thread and then on all cores; a ratio is taken within a round. Gradients are
random and stay what they are. The clock on the wall counts: threads that wait for each other
between two operators do so as in a run, so leave OMP_WAIT_POLICY unset.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contestants import SHAPES, make_settings
from torch import nn
from torchao.optim import _AdamW as TorchaoAdamW

from benchmarks.common import describe_machine, spread
from hlat.config.model import ModelConfig
from hlat.engine.native.step_rounding import build_shard_generator
from hlat.engine.parameter_shards import compute_shard
from hlat.model.decoder import Decoder
from hlat.optim.chunked_adamw import ChunkedAdamW

HERE = Path(__file__).resolve().parent
LIBRARIES = ["torch", "torchao"]
SECONDS = 0.5
"""That a contestant's turn takes."""
SETTINGS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
REFERENCE = "ours, nearest"
Weights = dict[str, nn.Parameter]
Step = Callable[[], Any]


def make_weights(model: ModelConfig) -> Weights:
    """Weights and gradients by name, in bf16."""
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in Decoder(model).named_parameters()}
    weights = {name: nn.Parameter(torch.randn(shape).bfloat16()) for name, shape in shapes.items()}
    for weight in weights.values():
        weight.grad = torch.randn(weight.shape).mul(1e-3).bfloat16()
    return weights


def ours(
    model: ModelConfig, weights: Weights, stochastic: bool, backend: str | None = None
) -> Step:
    """Return the update of the native engine, with stochastic rounding or rounding to nearest."""
    noise = {
        weight: build_shard_generator(
            compute_shard(model, name, tuple(weight.shape), 1, 0), 0, weight.device
        )
        for name, weight in weights.items()
    }
    numbers = torch.arange(3)
    draw = (lambda weight: noise[weight].generate(numbers)) if stochastic else None
    return ChunkedAdamW([{"params": list(weights.values())}], draw, backend, **SETTINGS).step


def open_contestants(model: ModelConfig) -> dict[str, Step]:
    """A step of each, by the name that the table shows."""

    def fresh() -> list[nn.Parameter]:
        return list(make_weights(model).values())

    return {
        "ours, stochastic": ours(model, make_weights(model), True),
        "ours, stochastic, compiled": ours(model, make_weights(model), True, "inductor"),
        REFERENCE: ours(model, make_weights(model), False),
        "torch, operator by operator": torch.optim.AdamW(fresh(), **SETTINGS, foreach=False).step,
        "torch, foreach": torch.optim.AdamW(fresh(), **SETTINGS, foreach=True).step,
        "torch, fused": torch.optim.AdamW(fresh(), **SETTINGS, fused=True).step,
        "torchao, stochastic": TorchaoAdamW(fresh(), **SETTINGS, bf16_stochastic_round=True).step,
    }


def seconds(step: Step, least: float = 0.0) -> float:
    """The median call over a stretch of at least so long."""
    times: list[float] = []
    while sum(times) <= least:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(model: ModelConfig, threads: int, num_rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant."""
    torch.set_num_threads(threads)
    count = sum(weight.numel() for weight in make_weights(model).values())
    steps = open_contestants(model)
    first = {name: seconds(step) for name, step in steps.items()}
    rounds = [
        {name: seconds(step, SECONDS) for name, step in steps.items()} for _ in range(num_rounds)
    ]
    return [
        {
            "contestant": name,
            "threads": threads,
            "parameters": count,
            "first_step_seconds": round(first[name], 3),
            "nanoseconds_per_parameter": spread([times[name] / count * 1e9 for times in rounds]),
            "ratio": spread([times[name] / times[REFERENCE] for times in rounds]),
        }
        for name in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=HERE / "update.json")
    arguments = parser.parse_args()
    model = make_settings("ours", arguments.shape, "bf16", "cpu").config.model
    rows = [
        row
        for threads in (1, os.cpu_count() or 1)
        for row in measure(model, threads, arguments.rounds)
    ]
    result = {
        "machine": describe_machine(LIBRARIES),
        "protocol": {"rounds": arguments.rounds, "shape": arguments.shape},
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
