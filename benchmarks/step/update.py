"""Measure the nanoseconds of an AdamW update per bf16 weight, for hlat and its peers.

Usage: python benchmarks/step/update.py [--shape small] [--rounds 10] [--output update.json]

All contestants run in one process, each with separate weights in the shapes of a model. They
alternate, first on one thread and then on all cores, and ratios are computed within a round.
Gradients are random and constant. The metric is wall time. Leave OMP_WAIT_POLICY unset, so that
threads wait between operators as in a run.
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
from hlat.config.optimizer import OptimizerConfig
from hlat.distributed.parameter_shards import compute_shard
from hlat.engine.native.step_rounding import build_shard_generator
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_module_parameters
from hlat.optim.adamw import ADAMW
from hlat.optim.low_precision_optimizer import LowPrecisionOptimizer
from hlat.optim.optimizer_factory import build_param_groups

HERE = Path(__file__).resolve().parent
LIBRARIES = ["torch", "torchao"]
SECONDS = 0.5
"""Duration of an interval of a contestant."""
SETTINGS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
REFERENCE = "ours, nearest"
Weights = dict[str, nn.Parameter]
Step = Callable[[], Any]


def make_weights(model: ModelConfig) -> Weights:
    """Return bf16 weights with gradients by name."""
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in Decoder(model).named_parameters()}
    weights = {name: nn.Parameter(torch.randn(shape).bfloat16()) for name, shape in shapes.items()}
    for weight in weights.values():
        weight.grad = torch.randn(weight.shape).mul(1e-3).bfloat16()
    return weights


def make_ours(
    model: ModelConfig, weights: Weights, stochastic: bool, backend: str | None = None
) -> Step:
    """Return the update of the native engine, with stochastic rounding or rounding to nearest."""
    generators = {
        weights[parameter.name]: build_shard_generator(
            compute_shard(parameter, 1, 0), 0, torch.device("cpu")
        )
        for parameter in list_module_parameters(model)
    }
    counters = torch.arange(3)
    random_bits = (lambda weight, _: generators[weight].generate(counters)) if stochastic else None
    roles = {parameter.name: parameter.specs[0].role for parameter in list_module_parameters(model)}
    params = [(weight, roles[name]) for name, weight in weights.items()]
    settings = OptimizerConfig(lr=SETTINGS["lr"])
    groups = build_param_groups(settings, params)
    return LowPrecisionOptimizer(groups, ADAMW, settings.lr, random_bits, backend).step


def open_contestants(model: ModelConfig) -> dict[str, Step]:
    """Return the update of each contestant by its name in the table."""

    def params() -> list[nn.Parameter]:
        return list(make_weights(model).values())

    return {
        "ours, stochastic": make_ours(model, make_weights(model), True),
        "ours, stochastic, compiled": make_ours(model, make_weights(model), True, "inductor"),
        REFERENCE: make_ours(model, make_weights(model), False),
        "torch, operator by operator": torch.optim.AdamW(params(), **SETTINGS, foreach=False).step,
        "torch, foreach": torch.optim.AdamW(params(), **SETTINGS, foreach=True).step,
        "torch, fused": torch.optim.AdamW(params(), **SETTINGS, fused=True).step,
        "torchao, stochastic": TorchaoAdamW(params(), **SETTINGS, bf16_stochastic_round=True).step,
    }


def seconds(step: Step, min_seconds: float = 0.0) -> float:
    """Return the median time of a call over at least `min_seconds`."""
    times: list[float] = []
    while sum(times) <= min_seconds:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(model: ModelConfig, threads: int, num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contestant."""
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
