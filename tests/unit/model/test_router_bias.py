"""Loss-free balancing: selection by score plus bias, and the update of the bias."""

import dataclasses

import pytest
import torch

from hlat.model.decoder_spec import list_buffer_specs, list_parameter_specs
from hlat.model.mlp_spec import MLPConfig, MoEConfig, RouterScoring
from hlat.model.moe import MoE
from tests.unit.model.test_moe import (
    MODEL,
    assert_equal_layers,
    build_moe,
    build_peer,
    copy_weights,
    sample_input,
)

RATE = 0.125


def build_biased(**settings) -> MoE:
    moe = MoEConfig(num_experts=5, experts_per_token=2, bias_update_rate=RATE, **settings)
    return build_moe(dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe)))


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("normalize", [False, True])
def test_selection_with_bias_is_that_of_deepseek_v3(groups: int, normalize: bool) -> None:
    peer = build_peer(
        "DeepseekV3",
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=3,
        topk_group=groups,
        n_shared_experts=2,
        moe_intermediate_size=10,
        routed_scaling_factor=2.5,
        norm_topk_prob=normalize,
    )
    moe = MoEConfig(
        num_experts=12,
        experts_per_token=4,
        intermediate_size=10,
        normalize_top_k=normalize,
        scoring=RouterScoring.sigmoid,
        routed_scale=2.5,
        num_groups=3,
        groups_per_token=groups,
        shared_size=20,
        bias_update_rate=RATE,
    )
    layer = MoE(dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe)))
    copy_weights(layer, peer, "shared_experts")
    bias_E = torch.randn(12, generator=torch.Generator().manual_seed(2))
    unbiased = layer.gate(sample_input())[1].sort().values
    for router in (peer.gate, layer.gate):
        router.e_score_correction_bias.copy_(bias_E)
    assert not torch.equal(layer.gate(sample_input())[1].sort().values, unbiased)
    assert_equal_layers(layer, peer)


def test_weights_of_softmax_scores_do_not_contain_the_bias() -> None:
    layer = build_biased(normalize_top_k=False)
    layer.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 9.0, 0.0, 8.0, 0.0]))
    weights_BSK, experts_BSK = layer.gate(sample_input())
    assert torch.equal(experts_BSK, torch.tensor([1, 3]).expand(3, 7, 2))
    scores_BSE = (sample_input() @ layer.gate.weight.T).softmax(-1)
    torch.testing.assert_close(weights_BSK, scores_BSE[..., [1, 3]], rtol=1e-6, atol=1e-7)


def test_update_adds_the_sign_of_the_mean_load_minus_the_load() -> None:
    router = build_biased().gate
    router.e_score_correction_bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    counts, proceed = torch.tensor([0, 10, 11, 9, 20, 7]), torch.tensor(False)
    router.statistics.update_buffers(counts, proceed)
    expected = [1.0 + RATE, 2.0, 3.0 - RATE, 4.0 + RATE, 5.0 - RATE]
    assert router.e_score_correction_bias.tolist() == expected
    router.statistics.update_buffers(counts, torch.tensor(True))
    assert router.e_score_correction_bias.tolist() == expected


def test_a_bias_of_zero_changes_no_bit() -> None:
    results = []
    for layer in (build_moe(), build_biased()):
        output = layer(sample_input())
        output.sum().backward()
        results.append((output, layer.gate.weight.grad))
    for plain, biased in zip(*results, strict=True):
        assert torch.equal(plain, biased)


def test_the_bias_is_a_buffer_and_no_parameter() -> None:
    model = dataclasses.replace(
        MODEL, mlp=MLPConfig(kind="moe", moe=MoEConfig(num_experts=5, bias_update_rate=RATE))
    )
    assert [(spec.name, spec.shape, spec.initial_value) for spec in list_buffer_specs(model)] == [
        (f"model.layers.{n}.mlp.gate.e_score_correction_bias", (5,), 0.0) for n in range(2)
    ]
    assert list_buffer_specs(MODEL) == ()
    assert list_parameter_specs(model) == list_parameter_specs(MODEL)
