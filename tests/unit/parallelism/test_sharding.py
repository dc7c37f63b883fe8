"""The sharding plan matches every parameter once, and local shapes add up."""

from fnmatch import fnmatchcase

import pytest

from hlat.config.model import ModelConfig
from hlat.model.parameter_specs import list_parameter_specs
from hlat.parallelism.sharding import (
    SHARDING_PLAN,
    ShardingRule,
    assign_layers_to_stages,
    compute_local_numel,
    compute_local_shape,
    find_sharding_rule,
)

LLAMA2_7B = ModelConfig("7b", 32, 4096, 11008, 32, 32, 32000)
LLAMA2_70B = ModelConfig("70b", 80, 8192, 28672, 64, 8, 32000)


@pytest.mark.parametrize("model", [LLAMA2_7B, LLAMA2_70B], ids=lambda model: model.name)
def test_every_parameter_matches_one_pattern(model: ModelConfig) -> None:
    for parameter in list_parameter_specs(model):
        found = [r for pattern, r in SHARDING_PLAN if fnmatchcase(parameter.name, pattern)]
        assert found == [find_sharding_rule(parameter.name)]
    used = {
        pattern
        for pattern, _ in SHARDING_PLAN
        for p in list_parameter_specs(model)
        if fnmatchcase(p.name, pattern)
    }
    assert used == {pattern for pattern, _ in SHARDING_PLAN}


def test_unknown_name() -> None:
    with pytest.raises(KeyError, match="rotary"):
        find_sharding_rule("model.rotary.inv_freq")


def shapes(model: ModelConfig, tp: int) -> dict[str, tuple[int, ...]]:
    return {
        p.name: compute_local_shape(p.name, p.shape, model, tp) for p in list_parameter_specs(model)
    }


def test_one_rank_has_full_parameters() -> None:
    assert shapes(LLAMA2_70B, 1) == {p.name: p.shape for p in list_parameter_specs(LLAMA2_70B)}


def test_shards_add_up() -> None:
    for parameter in list_parameter_specs(LLAMA2_7B):
        ranks = 1 if find_sharding_rule(parameter.name) is ShardingRule.replicated else 8
        local = compute_local_numel(parameter.name, parameter.shape, LLAMA2_7B, 8)
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


def test_stages() -> None:
    assert assign_layers_to_stages(80, 8) == tuple(range(10 * s, 10 * s + 10) for s in range(8))
    assert assign_layers_to_stages(5, 1) == (range(5),)
    assert assign_layers_to_stages(10, 4) == (range(2), range(2, 5), range(5, 8), range(8, 10))


@pytest.mark.parametrize("num_layers", [3, 7, 32])
def test_stages_cover_the_layers_in_order(num_layers: int) -> None:
    for pp in range(1, num_layers + 1):
        stages = assign_layers_to_stages(num_layers, pp)
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        sizes = [len(stage) for stage in stages]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[-1] == min(sizes)
