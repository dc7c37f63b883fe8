"""Limit of the tokens of an expert in a training sequence."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hlat.model.computation_settings import replace_settings
from hlat.model.mlp_spec import MoEConfig
from hlat.model.moe import MoE
from hlat.model.moe_spec import compute_capacity
from tests.unit.model.test_moe import MODEL, build_moe, sample_input
from tests.unit.model.test_router_statistics import start_step


def build_limited(factor: float | None, **settings) -> MoE:
    settings = {f"mlp.moe.{key}": value for key, value in settings.items()}
    return build_moe(replace_settings(MODEL, {"mlp.moe.capacity_factor": factor, **settings}))


@pytest.mark.parametrize(
    ("factor", "length", "experts", "per_token", "capacity"),
    [
        *((1.0, 128, 8, 2, 32), (1.25, 128, 8, 2, 40), (1.1, 10, 2, 2, 11)),
        *((1.0, 7, 5, 2, 3), (0.1, 1, 8, 1, 1), (0.7, 10, 1, 1, 7)),
    ],
)
def test_capacity(factor: float, length: int, experts: int, per_token: int, capacity: int) -> None:
    moe = MoEConfig(experts, per_token, capacity_factor=factor)
    assert compute_capacity(moe, length) == capacity


@pytest.mark.parametrize("factor", [0.2, 0.75, 1.0, 1.3])
def test_output_is_that_of_a_loop_over_tokens(factor: float) -> None:
    layer, x_BSH = build_limited(factor), sample_input()
    output, expected = layer(x_BSH), torch.zeros_like(x_BSH)
    weights_BSK, experts_BSK = build_limited(None).gate(x_BSH)
    num_dropped = 0
    for sequence, x_SH in enumerate(x_BSH):
        counts = [0] * 5
        for token, x_H in enumerate(x_SH):
            for weight, expert in zip(
                weights_BSK[sequence, token], experts_BSK[sequence, token].tolist(), strict=True
            ):
                counts[expert] += 1
                if counts[expert] > compute_capacity(layer.gate.settings, 7):
                    num_dropped += 1
                    continue
                expected[sequence, token] += weight * layer.experts[expert](x_H.view(1, -1))[0]
    assert num_dropped > 0
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_a_large_capacity_changes_no_bit() -> None:
    results = []
    for factor in (None, 2.5):
        layer, x_BSH = build_limited(factor), sample_input().requires_grad_()
        output = layer(x_BSH)
        output.square().sum().backward()
        results.append([output, x_BSH.grad, *(one.grad for one in layer.parameters())])
    assert all(map(torch.equal, *results))


def test_no_token_depends_on_a_later_one_or_another_sequence() -> None:
    layer, x_BSH = build_limited(0.6), sample_input().requires_grad_()
    layer(x_BSH)[1, 3].sum().backward()
    is_zero_BS = (x_BSH.grad == 0).all(-1)
    assert is_zero_BS[[0, 2]].all()
    assert is_zero_BS[1, 4:].all()
    changed = sample_input()
    changed[:, 4:] = changed[:, 4:].flip(-1)
    assert torch.equal(layer(changed)[:, :4], layer(sample_input())[:, :4])


def test_evaluation_drops_no_token() -> None:
    with torch.no_grad():
        outputs = [build_limited(factor)(sample_input()) for factor in (None, 0.1)]
    assert torch.equal(*outputs)


def test_dropped_tokens_are_counted_once_and_loads_count_them() -> None:
    counts = []
    for factor in (None, 0.6):
        layer, x_BSH = build_limited(factor), sample_input().requires_grad_()
        statistics = start_step(layer)
        checkpoint(layer, x_BSH, use_reentrant=False).sum().backward()
        counts.append(statistics.counts.tolist())
    assert counts[0] == [*counts[1][:5], 0]
    _, experts_BSK = layer.gate(sample_input())
    assert counts[1][5] == (experts_BSK == 5).sum() > 0


def test_recomputation_drops_the_same_tokens() -> None:
    gradients = []
    for recompute in (False, True):
        layer, x_BSH = build_limited(0.6), sample_input().requires_grad_()
        output = checkpoint(layer, x_BSH, use_reentrant=False) if recompute else layer(x_BSH)
        output.square().sum().backward()
        gradients.append([x_BSH.grad, *(one.grad for one in layer.parameters())])
    assert all(map(torch.equal, *gradients))
