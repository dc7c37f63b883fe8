"""Mixing bf16 and fp32 on a CPU allocates no fp32 copy of a full matrix."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hlat.config.optimizer import OptimizerConfig
from hlat.engine.native.cpu_matmul import has_bf16_matmul
from hlat.engine.native.gradient_accumulation import GradientAccumulator
from hlat.engine.native.step_rounding import NearestRounding
from hlat.model.loss import linear_cross_entropy
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw import ADAMW
from hlat.optim.gradient_norm import compute_global_norm
from hlat.optim.low_precision_optimizer import LowPrecisionOptimizer
from hlat.optim.optimizer_factory import build_param_groups

ROWS, WIDTH = 8192, 512
COPY = ROWS * WIDTH * 4
"""Bytes of the matrix in fp32."""


def build_matrix(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def allocations(work: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        work()
    return [event.self_cpu_memory_usage for event in profiled.events()]


def largest_allocation(work: Callable[[], object]) -> int:
    """Return the largest allocation of the second call."""
    work()
    return max(allocations(work))


def test_a_copy_is_detected() -> None:
    narrow = build_matrix()
    assert largest_allocation(lambda: narrow.float()) == COPY


def test_a_norm() -> None:
    tensors = [build_matrix()]
    assert largest_allocation(lambda: compute_global_norm(tensors)) <= COPY / 8


def test_an_update() -> None:
    weight = nn.Parameter(build_matrix())
    weight.grad = build_matrix()
    groups = build_param_groups(OptimizerConfig(lr=1e-3), [(weight, ParameterRole.matrix)])
    optimizer = LowPrecisionOptimizer(groups, ADAMW, 1e-3, None)
    assert largest_allocation(optimizer.step) <= COPY / 8


def test_a_sum_over_micro_batches() -> None:
    weight = nn.Parameter(build_matrix())
    sums = GradientAccumulator({"weight": weight}, torch.float32, NearestRounding())
    (weight * 1).sum().backward()

    def again() -> None:
        weight.grad = torch.ones_like(weight)
        sums._accumulate("weight", weight)

    assert largest_allocation(again) <= COPY / 2  # the gradient itself
    assert torch.equal(sums.get_gradient("weight"), torch.full((ROWS, WIDTH), 3.0))
    sums.close()


@pytest.mark.skipif(not has_bf16_matmul(), reason="matmuls of this CPU cast bf16 operands to fp32")
def test_the_heads_gradient() -> None:
    x, head = torch.randn(1, 1, WIDTH).bfloat16(), build_matrix()
    head.requires_grad_()
    targets = torch.zeros(1, 1, dtype=torch.int64)
    made = allocations(lambda: linear_cross_entropy(x, head, targets, fp32=True))
    assert made.count(COPY) == 1  # the sum itself
    assert sum(size >= COPY / 4 for size in made) == 2  # and what it is rounded to
