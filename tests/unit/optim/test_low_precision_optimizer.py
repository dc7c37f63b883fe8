"""LowPrecisionOptimizer equals torch's AdamW in fp32 bit for bit, and confines non-finite values."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hlat.config.model import ModelConfig
from hlat.config.optimizer import OptimizerConfig
from hlat.distributed.parameter_shards import compute_shard
from hlat.engine.native.step_rounding import build_shard_generator
from hlat.model.embedding_spec import build_head
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw import ADAMW
from hlat.optim.low_precision_optimizer import LowPrecisionOptimizer
from hlat.optim.optimizer_factory import build_param_groups, step_optimizer
from hlat.optim.update_rule import UpdateRule
from hlat.precision import stochastic_rounding
from hlat.precision.random_bits import RandomBits

MODEL = ModelConfig("test", 1, 48, 40, 4, 2, 131)
SETTINGS = OptimizerConfig(lr=1e-2)
TORCH_SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def build(
    weight: nn.Parameter,
    rule: UpdateRule = ADAMW,
    get_random_bits: Callable[[Tensor, int], RandomBits] | None = None,
) -> LowPrecisionOptimizer:
    groups = build_param_groups(SETTINGS, [(weight, ParameterRole.matrix)])
    return LowPrecisionOptimizer(groups, rule, SETTINGS.lr, get_random_bits)


def build_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(131, 48, generator=generator) for _ in range(3)]


def train(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()


def test_fp32_equals_torch(monkeypatch) -> None:
    monkeypatch.setitem(stochastic_rounding._CHUNK_NUMEL, "cpu", 16 * 48)
    ours, theirs = (nn.Parameter(torch.ones(131, 48)) for _ in range(2))
    train(build(ours), ours, build_gradients())
    train(torch.optim.AdamW([theirs], **TORCH_SETTINGS, fused=True), theirs, build_gradients())
    assert torch.equal(ours, theirs)


def test_device_without_the_kernel_equals_torch() -> None:
    ours, theirs = (nn.Parameter(torch.ones(131, 48)) for _ in range(2))
    optimizer = build(ours, dataclasses.replace(ADAMW, fused=None))
    train(optimizer, ours, build_gradients())
    train(torch.optim.AdamW([theirs], **TORCH_SETTINGS, fused=True), theirs, build_gradients())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    before = ours.clone()
    step_optimizer(optimizer, torch.tensor(True))
    assert torch.equal(ours, before)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_non_finite_gradient_affects_one_weight(odd) -> None:
    weight = nn.Parameter(torch.ones(131, 48, dtype=torch.bfloat16))
    shard = compute_shard(build_head(MODEL), 1, 0)
    bits = build_shard_generator(shard, 1, weight.device).generate(torch.arange(3))
    gradients = build_gradients()
    gradients[0][5, 7] = odd
    train(build(weight, get_random_bits=lambda *_: bits), weight, gradients)
    assert torch.isnan(weight).nonzero().tolist() == [[5, 7]]


def test_chunks_of_rows_are_updated(monkeypatch) -> None:
    monkeypatch.setitem(stochastic_rounding._CHUNK_NUMEL, "cpu", 16 * 48)
    shapes = []

    def compute(values, step, lr, group) -> list[Tensor]:
        shapes.append(tuple(values[1].shape))
        return values[1:]

    weight = nn.Parameter(torch.ones(131, 48))
    train(build(weight, UpdateRule(compute)), weight, build_gradients()[:1])
    assert {*shapes} == {(16, 48), (3, 48)}
    assert sum(rows for rows, _ in shapes) == 131
