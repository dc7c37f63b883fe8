"""Measure the experts of a layer with grouped matmuls, relative to one expert after the other.

Usage: python benchmarks/step/experts.py [--device cuda --recipe bf16]

Both compute forward and backward pass of the same experts and rows, and alternate. Ratios are
computed within a round. The metric is CPU time on a CPU and wall time on an accelerator.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from contestants import make_settings
from measure import synchronize
from torch import Tensor

from benchmarks.common import describe_machine, spread
from hlat.model.experts import _apply_grouped, _apply_in_turn
from hlat.model.mlp import MLP
from hlat.model.moe_spec import get_expert_size

HERE = Path(__file__).resolve().parent
ROWS = (8, 32, 64, 128, 256, 1024)
"""Mean numbers of rows per expert."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_experts(arguments: argparse.Namespace) -> list[MLP]:
    """Return the experts of a layer with random weights."""
    model = make_settings("ours", arguments.shape, "fp32", "cpu").config.model
    experts = []
    for _ in range(model.mlp.moe.num_experts):
        expert = MLP(model, get_expert_size(model)).to(arguments.device, DTYPES[arguments.recipe])
        for param in expert.parameters():
            param.data.normal_(std=0.02)
        experts.append(expert)
    return experts


def sample_counts(num_experts: int, mean: int) -> Tensor:
    """Return numbers of rows with the given mean, from 0 to twice the mean."""
    half = torch.randint(0, mean + 1, (num_experts // 2,))
    return torch.cat([mean - half, mean + half])


def measure(arguments: argparse.Namespace, experts: list[MLP], mean: int) -> dict[str, Any]:
    """Return the row of a number of rows per expert."""
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    counts = sample_counts(len(experts), mean).to(arguments.device)
    hidden, dtype = experts[0].down_proj.weight.shape[0], DTYPES[arguments.recipe]
    rows = torch.randn(len(experts) * mean, hidden, device=arguments.device, dtype=dtype)
    gradient = torch.randn_like(rows)
    rows.requires_grad_()

    def measure_seconds(apply: Any) -> float:
        start = clock()
        for _ in range(arguments.steps):
            apply(experts, rows, counts).backward(gradient)
        synchronize(arguments.device)
        return (clock() - start) / arguments.steps

    for apply in (_apply_in_turn, _apply_grouped):
        measure_seconds(apply)
    rounds = [
        (measure_seconds(_apply_in_turn), measure_seconds(_apply_grouped))
        for _ in range(arguments.rounds)
    ]
    ratio = spread([grouped / in_turn for in_turn, grouped in rounds])
    print(f"{mean} rows per expert: grouped takes {ratio['median']:.2f} of the time in turn")
    in_turn = statistics.median(one for one, _ in rounds)
    return {"rows_per_expert": mean, "in_turn_seconds": round(in_turn, 6), "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="moe", help="shape of contestants.py with experts")
    parser.add_argument("--recipe", choices=DTYPES, default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps of an interval")
    parser.add_argument("--output", type=Path, default=HERE / "experts.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    experts = build_experts(arguments)
    result = {
        "rows": [measure(arguments, experts, mean) for mean in ROWS],
        "machine": describe_machine(["torch"]),
        "protocol": {
            name: getattr(arguments, name) for name in ("shape", "recipe", "rounds", "steps")
        },
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
