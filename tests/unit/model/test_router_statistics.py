"""Statistics of the router: loads, entropy and maximum violation of a step."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hlat.config.model import ModelConfig
from hlat.model.computation_settings import replace_settings
from hlat.model.mlp_spec import RouterScoring, StepMetricValue, get_mlp_spec
from hlat.model.step_statistics import StepStatistics
from tests.unit.model.test_moe import MODEL, build_moe, sample_input


def start_step(layer: torch.nn.Module) -> StepStatistics:
    (statistics,) = (one for one in layer.modules() if isinstance(one, StepStatistics))
    statistics.start_step(torch.device("cpu"))
    return statistics


@pytest.mark.parametrize("scoring", RouterScoring)
def test_counts_and_entropy_are_those_of_single_tokens(scoring: RouterScoring) -> None:
    layer = build_moe(replace_settings(MODEL, {"mlp.moe.scoring": scoring}))
    statistics = start_step(layer)
    layer(sample_input()).sum().backward()
    counts, entropy = [0] * 5, 0.0
    for x_H in sample_input().double().flatten(0, 1):
        logits = (layer.gate.weight.double() @ x_H).tolist()
        scores = [
            math.exp(z) if scoring is RouterScoring.softmax else 1 / (1 + math.exp(-z))
            for z in logits
        ]
        entropy -= sum(s / sum(scores) * math.log(s / sum(scores)) for s in scores)
        for expert in sorted(range(5), key=lambda n: -scores[n])[:2]:
            counts[expert] += 1
    assert statistics.counts.tolist() == [*counts, 0]
    assert statistics.sums.item() == pytest.approx(entropy, rel=1e-5)


def test_micro_batches_add_up_and_outputs_do_not_change() -> None:
    layer = build_moe()
    statistics = start_step(layer)
    whole = layer(sample_input())
    whole.sum().backward()
    counts, sums = statistics.counts.clone(), statistics.sums.clone()
    gradient = layer.gate.weight.grad.clone()
    statistics.start_step(torch.device("cpu"))
    for x_BSH in sample_input().split(2):
        layer(x_BSH).sum().backward()
    assert torch.equal(statistics.counts, counts)
    torch.testing.assert_close(statistics.sums, sums, rtol=1e-6, atol=0)
    layer = build_moe()  # without statistics
    output = layer(sample_input())
    output.sum().backward()
    assert torch.equal(output, whole)
    assert torch.equal(layer.gate.weight.grad, gradient)


def test_recomputation_and_evaluation_are_not_counted() -> None:
    layer = build_moe()
    statistics = start_step(layer)
    x_BSH = sample_input().requires_grad_()
    checkpoint(layer, x_BSH, use_reentrant=False).sum().backward()
    assert statistics.counts.sum() == 3 * 7 * 2
    with torch.no_grad():
        layer(sample_input())
    assert statistics.counts.sum() == 3 * 7 * 2


def compute_step_metrics(
    model: ModelConfig, counts: list[list[int]], sums: list[list[float]]
) -> dict[str, StepMetricValue]:
    return get_mlp_spec(model).compute_step_metrics(model, counts, sums)


def test_metrics_of_layers() -> None:
    counts = [[4, 4, 4, 4, 4, 3], [0] * 6, [20, 0, 0, 0, 0, 15]]
    sums = [[10.0], [0.0], [2.0]]
    expected = {
        "router_entropy": pytest.approx((1.0 + 0.2) / 2),
        "router_max_violation": 4.0,
        "router_violations": [0.0, None, 4.0],
        "router_loads": [[1.0] * 5, None, [5.0, 0.0, 0.0, 0.0, 0.0]],
    }
    assert compute_step_metrics(MODEL, counts, sums) == expected
    limited = replace_settings(MODEL, {"mlp.moe.capacity_factor": 1.0})
    expected["router_dropped"] = 18 / 40
    assert compute_step_metrics(limited, counts, sums) == expected
    assert compute_step_metrics(MODEL, [[0] * 6], [[0.0]]) == {}


def test_metrics_of_many_experts_have_no_loads() -> None:
    counts = [[2] * 1025 + [0]]
    model = replace_settings(MODEL, {"mlp.moe.num_experts": 1025})
    assert "router_loads" not in compute_step_metrics(model, counts, [[1.0]])
    counts[0].pop(0)
    model = replace_settings(MODEL, {"mlp.moe.num_experts": 1024})
    assert compute_step_metrics(model, counts, [[1.0]])["router_loads"] == [[1.0] * 1024]
