"""Limits of the classes of a step: the fastest matmuls, and bytes divided by the bandwidth.

All limits are measured in the process of the step.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.step_account import TimeSlice
from hlat.precision.torch_dtypes import TORCH_DTYPES

Matmul = tuple[int, int, int]
"""Sizes m, k and n of [m, k] x [k, n]."""
_SHAPE = re.compile(r"\[(\d+), (\d+)\]")
_MATMULS = {"aten::mm": 0, "aten::addmm_": 1, "aten::addmm": 1}
"""Index of the left factor among the inputs that are matrices, by operator."""
_STREAM_BYTES = 1 << 28
"""Size of each of the three arrays of the stream test."""
_MIN_SECONDS, _MIN_CALLS, _MAX_SECONDS, _NUM_ROUNDS = 0.02, 3, 1.0, 3


def measure_fastest(function: Callable[[], Any], device: str) -> float:
    """Return the seconds of the fastest of several calls."""
    fastest, total, calls = math.inf, 0.0, 0
    while calls < _MIN_CALLS or (total < _MIN_SECONDS and calls < 1000):
        start = time.perf_counter()
        function()
        if device != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - start
        fastest, total, calls = min(fastest, seconds), total + seconds, calls + 1
        if total > _MAX_SECONDS:
            break
    return fastest


class Stream:
    """STREAM's triad, a = b + s * c, on arrays larger than the caches."""

    def __init__(self, device: str) -> None:
        self.arrays = [torch.ones(_STREAM_BYTES // 4, device=device) for _ in range(3)]

    def move(self, num_bytes: int) -> None:
        """Read and write this number of bytes, without those of write-allocation."""
        while num_bytes > 0:
            size = min(num_bytes, 3 * _STREAM_BYTES)
            a, b, c = (array[: size // 12] for array in self.arrays)
            torch.add(b, c, alpha=0.5, out=a)
            num_bytes -= size


def measure_bandwidth(device: str) -> float:
    """Return the bytes per second of STREAM's triad, without write-allocation."""
    stream = Stream(device)
    for _ in range(3):  # the first pass maps the memory
        seconds = measure_fastest(lambda: stream.move(3 * _STREAM_BYTES), device)
    return 3 * _STREAM_BYTES / seconds


def parse_matmul(operator: str, shapes: str) -> Matmul | None:
    """Return the sizes of a matmul given the shapes of its inputs; None for other operators."""
    matrices = [(int(rows), int(columns)) for rows, columns in _SHAPE.findall(shapes)]
    if operator not in _MATMULS:
        return None
    if operator == "aten::addmm" and len(matrices) == 2:  # the bias is a vector
        left, right = matrices
    else:
        index = _MATMULS[operator]
        if len(matrices) < index + 2:
            return None
        left, right = matrices[index : index + 2]
    return (left[0], left[1], right[1]) if left[1] == right[0] else None


def count_matmuls(slices: Iterable[TimeSlice]) -> dict[Matmul, int]:
    """Return the number of matmuls of each size."""
    counts: dict[Matmul, int] = {}
    for one in slices:
        size = parse_matmul(one.operator, one.shapes) if one.time_class == "matmuls" else None
        if size is not None:
            counts[size] = counts.get(size, 0) + one.num_calls
    return counts


class MatmulTimes:
    """Seconds of the fastest matmul of each size, over the layouts of its factors."""

    def __init__(self, dtype: torch.dtype, device: str, sizes: Iterable[Matmul]) -> None:
        """Measure all sizes in turn, several times, since other load slows some of the time."""
        self.seconds = dict.fromkeys(sizes, math.inf)
        self.fastest: dict[Matmul, Callable[[], Any]] = {}
        for _ in range(_NUM_ROUNDS):
            for size in self.seconds:
                for matmul in _build_layouts(size, dtype, device):
                    if (seconds := measure_fastest(matmul, device)) < self.seconds[size]:
                        self.seconds[size], self.fastest[size] = seconds, matmul

    def compute_limit(self, counts: dict[Matmul, int]) -> float:
        """Return the seconds of all matmuls."""
        return sum(count * self.seconds[size] for size, count in counts.items())

    def compute_rate(self, counts: dict[Matmul, int]) -> float:
        """Return the FLOP/s over all matmuls."""
        flops = sum(2 * math.prod(size) * count for size, count in counts.items())
        return flops / (self.compute_limit(counts) or math.inf)


def _build_layouts(size: Matmul, dtype: torch.dtype, device: str) -> Iterator[Callable[[], Any]]:
    """Yield the matmul of a size with each layout of its factors."""
    m, k, n = size
    options: Any = {"dtype": dtype, "device": device}
    output = torch.empty(m, n, **options)
    for left in (torch.randn(m, k, **options), torch.randn(k, m, **options).t()):
        for right in (torch.randn(k, n, **options), torch.randn(n, k, **options).t()):
            yield partial(torch.mm, left, right, out=output)


def measure_attention_limit(config: Config, device: str) -> float:
    """Return the seconds of the seven matmuls of causal attention in all layers, half of each.

    Forward: scores and weighted values; backward: scores again, and four gradients.
    """
    model, batch = config.model, config.batch
    length, head_dim = batch.sequence_length, model.head_dim
    options: Any = {"dtype": TORCH_DTYPES[config.precision.compute_dtype], "device": device}
    num_heads = batch.global_batch_size * model.num_attention_heads
    heads, scores = (torch.randn(num_heads, length, size, **options) for size in (head_dim, length))
    with_scores = partial(torch.bmm, heads, heads.transpose(1, 2))
    with_values = partial(torch.bmm, scores, heads)
    rounds = [
        3 * measure_fastest(with_scores, device) + 4 * measure_fastest(with_values, device)
        for _ in range(_NUM_ROUNDS)
    ]
    return model.num_layers * min(rounds) / 2


def count_bytes(engine: NativeEngine, config: Config) -> dict[str, int]:
    """Return the bytes that each class moves at least in a step.

    Elementwise operators between two matmuls are one kernel, and each kernel reads its inputs and
    writes its outputs once. The loss reads the logits and writes their gradient.
    """
    model, batch = config.model, config.batch
    width = TORCH_DTYPES[config.precision.compute_dtype].itemsize
    tokens = batch.global_batch_size * batch.sequence_length
    rotated = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    # Forward: two sums with a norm, 4 H each, rotary embedding, activation 3 I; backward: two norms
    # with a sum, 4 H each, rotary embedding, activation 5 I
    layer = 16 * model.hidden_size + 4 * rotated + 8 * model.intermediate_size
    outside = 6 * model.hidden_size  # embedding and last norm, both passes
    elementwise = tokens * (model.num_layers * layer + outside) * width
    return {
        "elementwise": elementwise + model.vocab_size * model.hidden_size * width,
        "loss": 2 * tokens * model.vocab_size * width,
        **_count_update_bytes(engine, config),
    }


def _count_update_bytes(engine: NativeEngine, config: Config) -> dict[str, int]:
    """Return the bytes of the update and of the copies of master weights.

    The update reads gradients twice, for their norm and for itself, and reads and writes weights
    and optimizer state.
    """
    precision, params = config.precision, engine.params
    grad_width = TORCH_DTYPES[precision.grad_accum_dtype].itemsize
    optimizer = rounding = 0
    for name, param in params.model_params.items():
        state = params.get_state(name)
        optimizer += 2 * param.numel() * grad_width
        optimizer += 2 * sum(tensor.nbytes for tensor in state.values())
        if precision.master_weight_dtype is not None:
            rounding += state["weights"].nbytes + param.nbytes
    return {"optimizer": optimizer, "rounding": rounding}
