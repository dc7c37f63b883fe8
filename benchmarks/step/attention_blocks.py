"""Measure causal attention of a CPU, forward and backward: torch's kernel, and blocks of queries.

Usage: python benchmarks/step/attention_blocks.py     (writes attention_blocks.json; two minutes)

The contestants alternate, ratios are computed within a round, and the metric is CPU time. Errors
are relative to torch's kernel in fp64, with the same inputs.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.common import describe_machine, spread
from hlat.model.block_attention import causal_block_attention
from hlat.model.cpu_attention import interval_attention

HERE = Path(__file__).resolve().parent
SHAPES = [(8, 4, 2, 256, 32), (4, 4, 2, 512, 64), (1, 12, 12, 512, 64), (2, 8, 2, 2048, 64)]
"""Sequences, query heads, key/value heads, tokens, head size."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Json = dict[str, Any]


def attend_by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attend_in_intervals(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y: Tensor = interval_attention(q, k, v, None, None, None, q.shape[-1] ** -0.5, None)[0]
    return y


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_block_attention(q, k, v, q.shape[-1] ** -0.5)


CONTESTANTS: dict[str, Callable[..., Tensor]] = {
    "torch": attend_by_torch,
    "operator in fp32": attend_in_intervals,
    "fused blocks": torch.compile(attend_in_blocks, fullgraph=True, dynamic=False),
}


def run(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of q, k and v."""
    *inputs, grad = (tensor.detach().clone() for tensor in tensors)
    y = attend(*(x.requires_grad_() for x in inputs))
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def compute_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of the norms."""
    pairs = zip(actual, expected, strict=True)
    return max(((a.double() - e).norm() / e.norm()).item() for a, e in pairs)


def measure(shape: tuple[int, ...], recipe: str, rounds: int) -> list[Json]:
    """Return a row for each contestant."""
    num_rows, num_heads, num_groups, length, head_dim = shape
    tensors = [
        torch.randn(num_rows, length, heads, head_dim).to(DTYPES[recipe]).transpose(1, 2)
        for heads in (num_heads, num_groups, num_groups, num_heads)
    ]
    expected = run(attend_by_torch, [tensor.double() for tensor in tensors])
    errors = {name: compute_error(run(c, tensors), expected) for name, c in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        for name, contestant in CONTESTANTS.items():
            start = time.process_time()
            run(contestant, tensors)
            times[name].append(time.process_time() - start)
    return [
        {
            "contestant": name,
            "recipe": recipe,
            "shape": shape,
            "seconds": spread(seconds),
            "ratio": spread([a / b for a, b in zip(seconds, times["torch"], strict=True)]),
            "error": errors[name],
        }
        for name, seconds in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=HERE / "attention_blocks.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 2 * len(SHAPES) * len(DTYPES)
    rows = []
    for shape in SHAPES:
        for recipe in DTYPES:
            rows += measure(shape, recipe, arguments.rounds)
            print(*rows[-1].values(), flush=True)
    result = {"rows": rows, "machine": describe_machine(["torch"])}
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
