"""Measure causal attention, forward and backward, by kernel and mode of determinism.

Usage: python benchmarks/gpu/attention.py DEVICE SHAPE [SHAPE ...]

The documents of the last kernel are a few hundred tokens long.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from contestants import make_settings
from measure import print_result, synchronize
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hlat.model.attention_kernels import KeyRange, attend, build_masks, compute_document_starts

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DOCUMENT_LENGTH = 512
REPETITIONS = 5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def list_kernels(num_rows: int, length: int, device: str) -> dict[str, Attend]:
    """Return functions of queries, keys and values [B, heads, S, D]."""

    def make_sdpa(backend: SDPBackend | None) -> Attend:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            is_gqa = q.shape[1] != k.shape[1]
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_gqa)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_gqa)

        return call

    document_ids = torch.arange(length, device=device).expand(num_rows, -1) // DOCUMENT_LENGTH
    starts = compute_document_starts(document_ids)
    shape = (num_rows, length, length)
    documents = build_masks(KeyRange(starts), [None], shape, torch.bfloat16, torch.device(device))

    def attend_within_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, q.shape[-1] ** -0.5, documents)

    return {
        "torch's choice": make_sdpa(None),
        **{name: make_sdpa(backend) for name, backend in BACKENDS.items()},
        "hlat, documents": attend_within_documents,
    }


def time_kernel(call: Attend, inputs: list[Tensor], device: str) -> float:
    """Return the median seconds of a forward and a backward pass."""
    times = []
    for repetition in range(2 + REPETITIONS):
        synchronize(device)
        start = time.perf_counter()
        y = call(*inputs)
        y.backward(torch.ones_like(y))
        synchronize(device)
        if repetition >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(shape: str, device: str) -> list[dict[str, Any]]:
    """Return a row for each kernel and mode of determinism."""
    config = make_settings("ours", shape, "bf16", device).config
    model, batch = config.model, config.batch
    num_rows, length = config.micro_batch_size, batch.sequence_length
    heads = (model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads)
    inputs = [
        torch.randn(num_rows, length, count, model.head_dim, device=device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for count in heads
    ]
    # 2 matmuls forward and 5 backward over half of the scores (arXiv 2307.08691, section 4.1)
    flops = 7 * num_rows * heads[0] * length**2 * model.head_dim
    rows = []
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        for name, call in list_kernels(num_rows, length, device).items():
            row: dict[str, Any] = {"shape": shape, "kernel": name, "deterministic": deterministic}
            try:
                seconds = time_kernel(call, inputs, device)
            except RuntimeError as error:  # the kernel does not support these inputs
                rows.append(row | {"failure": str(error).splitlines()[0]})
                continue
            rows.append(row | {"seconds": seconds, "causal_flops_per_second": flops / seconds})
    return rows


def main() -> None:
    device, *shapes = sys.argv[1:]
    print_result({"rows": [row for shape in shapes for row in measure(shape, device)]})
    os._exit(0)  # workers of compilers may still run


if __name__ == "__main__":
    main()
