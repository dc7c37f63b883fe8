"""AdamW on a few rows at a time: torch's own numbers, and what is not a number."""

import math

import pytest
import torch
from torch import Tensor, nn

from hlat.config.model import Model
from hlat.engine.native import noise, rounding
from hlat.engine.native.chunked_adamw import ChunkedAdamW
from hlat.engine.shards import shard

MODEL = Model("test", 1, 48, 40, 4, 2, 131)
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def some_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(131, 48, generator=generator) for _ in range(3)]


def train(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()


def test_in_fp32_it_is_torchs(monkeypatch) -> None:
    monkeypatch.setitem(rounding._CHUNK, "cpu", 16 * 48)
    ours, theirs = (nn.Parameter(torch.ones(131, 48)) for _ in range(2))
    train(ChunkedAdamW([{"params": [ours]}], None, **SETTINGS), ours, some_gradients())
    train(torch.optim.AdamW([theirs], **SETTINGS, fused=True), theirs, some_gradients())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_stays_in_its_weight(odd) -> None:
    weight = nn.Parameter(torch.ones(131, 48, dtype=torch.bfloat16))
    held = shard(MODEL, "lm_head.weight", (131, 48), 1, 0)
    draw = noise.make_noise(held, 1, weight.device).draw(torch.arange(3))
    gradients = some_gradients()
    gradients[0][5, 7] = odd
    train(ChunkedAdamW([{"params": [weight]}], lambda _: draw, **SETTINGS), weight, gradients)
    assert torch.isnan(weight).nonzero().tolist() == [[5, 7]]
