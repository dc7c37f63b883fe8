"""Where bf16 meets fp32 on a CPU, no copy of a whole matrix is made, for caches and for memory."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hlat.engine.native.chunked_adamw import ChunkedAdamW
from hlat.engine.native.gradients import GradientSums
from hlat.model.loss import head_loss
from hlat.optimizer import global_norm

ROWS, WIDTH = 8192, 512
COPY = ROWS * WIDTH * 4
"""Bytes of the matrix in fp32."""


def matrix(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def allocations(work: Callable[[], object]) -> list[int]:
    """Bytes of the tensors that are made."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    return [event.self_cpu_memory_usage for event in profiled.events()]


def largest_allocation(work: Callable[[], object]) -> int:
    """Bytes of the largest tensor that is made, by any but the first call."""
    work()
    return max(allocations(work))


def test_a_copy_would_be_seen() -> None:
    narrow = matrix()
    assert largest_allocation(lambda: narrow.float()) == COPY


def test_a_norm() -> None:
    tensors = [matrix()]
    assert largest_allocation(lambda: global_norm(tensors)) <= COPY / 8


def test_an_update() -> None:
    weight = nn.Parameter(matrix())
    weight.grad = matrix()
    optimizer = ChunkedAdamW(
        [{"params": [weight]}], None, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    assert largest_allocation(optimizer.step) <= COPY / 8


def test_a_sum_over_micro_batches() -> None:
    weight = nn.Parameter(matrix())
    sums = GradientSums({"weight": weight}, torch.float32, None)
    (weight * 1).sum().backward()

    def again() -> None:
        weight.grad = torch.ones_like(weight)
        sums._add("weight", weight)

    assert largest_allocation(again) <= COPY / 2  # the gradient itself
    assert torch.equal(sums.of("weight"), torch.full((ROWS, WIDTH), 3.0))
    sums.close()


def test_the_heads_gradient() -> None:
    x, head = torch.randn(1, 1, WIDTH).bfloat16(), matrix()
    head.requires_grad_()
    targets = torch.zeros(1, 1, dtype=torch.int64)
    made = allocations(lambda: head_loss(x, head, targets, fp32=True))
    assert made.count(COPY) == 1  # the sum itself
    assert sum(size >= COPY / 4 for size in made) == 2  # and what it is rounded to
