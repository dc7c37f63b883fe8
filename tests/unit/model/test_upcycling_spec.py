"""Settings with which an upcycled model would differ from the dense one are refused."""

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.config.resolve import resolve_config
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.upcycling_spec import (
    DenseSlice,
    build_dense_model,
    find_dense_slice,
    find_upcycling_problems,
)

NOISE = "model.mlp.moe.upcycling_noise"
BASE = ["model.mlp.kind=moe", "model.init_from=dense", f"{NOISE}=0"]
SIZE = "model.mlp.moe.intermediate_size"

REFUSED = [
    (
        ["model.init_from=null"],
        f"{NOISE}=0 has no effect without model.init_from; set model.init_from to the directory of a dense model, or {NOISE}=null",
    ),
    ([f"{NOISE}=-0.1"], f"{NOISE}=-0.1 is outside [0, inf)"),
    ([f"{NOISE}=nan"], f"{NOISE}=nan is outside [0, inf)"),
    (
        ["model.mlp.kind=dense"],
        "the settings model.mlp.moe have no effect, since model.mlp.kind is dense; add model.mlp.kind=moe or remove them",
    ),
    (
        ["model.mlp.moe.normalize_top_k=false"],
        f"model.mlp.moe.normalize_top_k=false and {NOISE}=0: the weights of the selected experts have another sum for each token, so that the outputs differ from those of the dense model; set model.mlp.moe.normalize_top_k=true",
    ),
    (
        ["model.mlp.moe.shared_size=64"],
        f"model.mlp.moe.shared_size=64 and {NOISE}=0: the dense model has no shared network, whose output would be added; set model.mlp.moe.shared_size=null",
    ),
    (
        [f"{SIZE}=96"],
        f"{SIZE}=96 does not divide model.intermediate_size=352, the width of the dense network; use a divisor, or {SIZE}=null for whole copies",
    ),
    (
        [f"{SIZE}=704"],
        f"{SIZE}=704 does not divide model.intermediate_size=352, the width of the dense network; use a divisor, or {SIZE}=null for whole copies",
    ),
    (
        [f"{SIZE}=88"],
        f"model.mlp.moe.experts_per_token=2 is not a multiple of 4, the experts of {SIZE}=88 into which the dense network of model.intermediate_size=352 is split; use a multiple of 4",
    ),
    (
        [f"{SIZE}=176", "model.mlp.moe.num_experts=9"],
        f"model.mlp.moe.num_experts=9 is not a multiple of 2, the experts of {SIZE}=176 into which the dense network of model.intermediate_size=352 is split; use a multiple of 2",
    ),
    (
        [
            *(f"{SIZE}=88", "model.mlp.moe.experts_per_token=4", "model.mlp.moe.num_groups=4"),
            "model.mlp.moe.groups_per_token=2",
        ],
        f"model.mlp.moe.num_experts=8 in model.mlp.moe.num_groups=4 groups is not a multiple of 4 in each group, the experts of {SIZE}=88 into which the dense network of model.intermediate_size=352 is split; use a multiple of 4 in each group",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[case[1][:50] for case in REFUSED])
def test_refused_settings(compose, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config(compose(*BASE, *overrides))
    assert refused.value.problems == (message,)


ACCEPTED = [
    [],
    ["model.mlp.moe.scoring=sigmoid", "model.mlp.moe.routed_scale=2.5"],
    ["model.mlp.moe.normalize_top_k=false", "model.mlp.moe.experts_per_token=8"],
    [f"{SIZE}=88", "model.mlp.moe.experts_per_token=4", "model.mlp.moe.num_groups=2"],
    ["model.mlp.moe.num_dense_layers=1", "model.mlp.moe.every=2"],
]


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_accepted_settings(compose, overrides: list[str]) -> None:
    model = resolve_config(compose(*BASE, *overrides)).model
    dense = build_dense_model(model, "llama")
    shapes = {spec.name: spec.shape for spec in list_parameter_specs(dense)}
    read = set()
    for spec in list_parameter_specs(model):
        source = find_dense_slice(model, spec)
        assert (source is None) == spec.name.endswith(".mlp.gate.weight")
        if source is not None:
            read.add(source.name)
            ends = map(sum, zip(source.offset, spec.shape, strict=True))
            assert all(end <= size for end, size in zip(ends, shapes[source.name], strict=True))
    assert read == shapes.keys()


def test_slices_of_a_virtual_group() -> None:
    model = ModelConfig("x", 1, 64, 96, 4, 2, 131)
    model.mlp.kind = "moe"
    moe = model.mlp.moe
    moe.intermediate_size, moe.routed_scale, moe.upcycling_noise = 32, 2.0, 0.0
    moe.num_experts, moe.experts_per_token = 6, 3
    specs = {spec.name: spec for spec in list_parameter_specs(model)}
    prefix = "model.layers.0.mlp"
    found = [
        find_dense_slice(model, specs[f"{prefix}.experts.{expert}.{name}.weight"])
        for expert in (1, 5)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    assert found == [
        DenseSlice(f"{prefix}.gate_proj.weight", (32, 0), 1.0, True),
        DenseSlice(f"{prefix}.up_proj.weight", (32, 0), 1.0, True),
        DenseSlice(f"{prefix}.down_proj.weight", (0, 32), 1.5, True),
        DenseSlice(f"{prefix}.gate_proj.weight", (64, 0), 1.0, True),
        DenseSlice(f"{prefix}.up_proj.weight", (64, 0), 1.0, True),
        DenseSlice(f"{prefix}.down_proj.weight", (0, 64), 1.5, True),
    ]
    moe.upcycling_noise = None
    moe.shared_size = 5
    assert list(find_upcycling_problems(model)) == []
