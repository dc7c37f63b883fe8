"""Local shapes of parameters add up to the global shapes."""

import pytest

from hlat.config.model import ModelConfig
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.parameter_spec import ExpertIndex, list_local_experts

LLAMA2_7B = ModelConfig("7b", 32, 4096, 11008, 32, 32, 32000)
LLAMA2_70B = ModelConfig("70b", 80, 8192, 28672, 64, 8, 32000)


def shapes(model: ModelConfig, tp: int) -> dict[str, tuple[int, ...]]:
    return {p.name: p.compute_local_shape(tp) for p in list_parameter_specs(model)}


def test_one_rank_has_full_parameters() -> None:
    assert shapes(LLAMA2_70B, 1) == {p.name: p.shape for p in list_parameter_specs(LLAMA2_70B)}


def test_shards_add_up() -> None:
    for parameter in list_parameter_specs(LLAMA2_7B):
        ranks = 1 if parameter.sharding.is_replicated else 8
        local = parameter.compute_local_numel(8)
        assert ranks * local == parameter.numel


def test_fewer_key_value_heads_than_ranks_are_replicated() -> None:
    found = shapes(LLAMA2_70B, 32)
    assert found["model.layers.3.self_attn.q_proj.weight"] == (256, 8192)
    assert found["model.layers.3.self_attn.k_proj.weight"] == (128, 8192)
    assert found["model.layers.3.self_attn.v_proj.weight"] == (128, 8192)
    assert found["model.layers.3.self_attn.o_proj.weight"] == (8192, 256)
    assert found["model.layers.3.mlp.gate_proj.weight"] == (896, 8192)
    assert found["model.layers.3.mlp.down_proj.weight"] == (8192, 896)
    assert found["model.norm.weight"] == (8192,)


def test_vocabulary_is_padded() -> None:
    model = ModelConfig("odd", 1, 64, 96, 4, 4, 131)
    assert shapes(model, 4)["lm_head.weight"] == (33, 64)
    assert shapes(model, 4)["model.embed_tokens.weight"] == (33, 64)


@pytest.mark.parametrize(
    ("num_experts", "ep", "blocks"),
    [(8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]), (5, 2, [[0, 1], [2, 3, 4]]), (3, 3, [[0], [1], [2]])],
)
def test_expert_parallel_ranks_have_consecutive_experts(num_experts, ep, blocks) -> None:
    assert [[*list_local_experts(num_experts, ep, rank)] for rank in range(ep)] == blocks
    indices = [ExpertIndex(index, num_experts) for index in range(num_experts)]
    owners = [[rank for rank in range(ep) if one.is_local(ep, rank)] for one in indices]
    assert [one for one in owners if len(one) != 1] == []
