"""Operators of a step that the benchmark records and repeats."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.step.step_operators import OperatorRecorder, OperatorStep, TensorSpec
from hlat.config.resolve import resolve_config

MM, MUL_, CAT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.mul_.Tensor,
    torch.ops.aten.cat.default,
)


def test_calls_are_counted_by_layout_without_views() -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 4)
    with OperatorRecorder() as recorder:
        for _ in range(3):
            a @ b
        a @ a.t()  # other strides
        torch.cat([a[:2], a[2:]], dim=1).mul_(2.0)
    found = {(call.operator, count) for call, count in recorder.counts.items()}
    assert found == {(MM, 3), (MM, 1), (CAT, 1), (MUL_, 1)}


def test_operators_of_the_backward_pass_are_counted() -> None:
    a = torch.randn(4, 3, requires_grad=True)
    with OperatorRecorder() as recorder:
        (a @ torch.randn(3, 2)).sum().backward()
    assert sum(n for call, n in recorder.counts.items() if call.operator == MM) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_repeated_tensors_have_the_layout_of_the_recorded(dtype) -> None:
    spec = TensorSpec((2, 3, 4), (12, 1, 3), dtype)
    built = spec.build()
    assert (built.shape, built.stride(), built.dtype) == (spec.shape, spec.stride, spec.dtype)
    assert built.unique().tolist() == [0 if dtype is torch.int64 else 1]


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mixed"])
def test_the_operators_of_a_step_run_alone(compose, small, recipe) -> None:
    config = resolve_config(compose(*small, f"precision={recipe}"))
    tokens = np.ones((config.batch.global_batch_size, config.batch.sequence_length), np.int32)
    step = OperatorStep(SimpleNamespace(config=config, tokens=lambda: tokens))
    step.step()
    called = {call.func for call, _ in step.calls}
    assert {MM, torch.ops.aten._fused_adamw_.default} <= called
