"""Compare the speed of torch's causal attention with that of matmuls on one core.

Usage: python benchmarks/planning/attention_speed.py

The attention of `UNKNOWN_HARDWARE` in hlat/plan/hardware_efficiency.py is from this measurement.
"""

import time
from collections.abc import Callable

import torch
from torch.nn import functional

REPETITIONS = 30
HEAD_SIZE = 64
LENGTHS = {256: (4, 8), 512: (2, 8), 1024: (1, 4)}
"""Sequences and heads by number of positions."""
MATMULS = [(256, 320, 960), (1024, 320, 1760), (1024, 512, 1536), (1024, 1408, 512)]
"""Rows, inputs and outputs."""


def measure(run: Callable[[], object]) -> float:
    """Return the mean seconds of a call after two others."""
    for _ in range(2):
        run()
    start = time.perf_counter()
    for _ in range(REPETITIONS):
        run()
    return (time.perf_counter() - start) / REPETITIONS


def print_attention(batch: int, heads: int, length: int) -> None:
    """Print the speed of both passes of causal attention."""
    shape = (batch, heads, length, HEAD_SIZE)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape)

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    forward = measure(attend)
    backward = measure(lambda: attend().backward(gradient)) - forward
    flops = 2e-9 * batch * heads * length**2 * HEAD_SIZE
    print(
        f"attention, {length} positions: forward {flops / forward:.0f} GFLOP/s, "
        f"backward {2.5 * flops / backward:.0f}"
    )


def print_matmul(rows: int, inputs: int, outputs: int) -> None:
    """Print the speed of a matmul."""
    a, b = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    seconds = measure(lambda: a @ b.t())
    speed = 2e-9 * rows * inputs * outputs / seconds
    print(f"matmul {rows} x {inputs} x {outputs}: {speed:.0f} GFLOP/s")


def main() -> None:
    torch.set_num_threads(1)
    for length, (batch, heads) in LENGTHS.items():
        print_attention(batch, heads, length)
    for sizes in MATMULS:
        print_matmul(*sizes)


if __name__ == "__main__":
    main()
