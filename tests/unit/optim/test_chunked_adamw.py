"""ChunkedAdamW is bit-identical to torch's AdamW in fp32 and confines non-finite values."""

import math

import pytest
import torch
from torch import Tensor, nn

from hlat.config.model import ModelConfig
from hlat.distributed.parameter_shards import compute_shard
from hlat.engine.native.step_rounding import build_shard_generator
from hlat.model.embedding_spec import build_head
from hlat.optim import chunked_adamw
from hlat.optim.adamw import step_optimizer
from hlat.optim.chunked_adamw import ChunkedAdamW
from hlat.precision import stochastic_rounding

MODEL = ModelConfig("test", 1, 48, 40, 4, 2, 131)
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


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
    train(ChunkedAdamW([{"params": [ours]}], None, **SETTINGS), ours, build_gradients())
    train(torch.optim.AdamW([theirs], **SETTINGS, fused=True), theirs, build_gradients())
    assert torch.equal(ours, theirs)


def test_device_without_the_kernel_equals_torch(monkeypatch) -> None:
    monkeypatch.setattr(chunked_adamw, "has_fused_adamw", lambda device, dtype: False)
    ours, theirs = (nn.Parameter(torch.ones(131, 48)) for _ in range(2))
    optimizer = ChunkedAdamW([{"params": [ours]}], None, **SETTINGS)
    train(optimizer, ours, build_gradients())
    train(torch.optim.AdamW([theirs], **SETTINGS, fused=True), theirs, build_gradients())
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
    train(ChunkedAdamW([{"params": [weight]}], lambda _: bits, **SETTINGS), weight, gradients)
    assert torch.isnan(weight).nonzero().tolist() == [[5, 7]]
