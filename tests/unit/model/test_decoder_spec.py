"""Names, counts, arithmetic and initial deviations against published figures."""

import math

import pytest

from hlat.config.model import ModelConfig
from hlat.model.decoder_spec import (
    ScaledInit,
    compute_flops_per_token,
    compute_init_std,
    count_parameters,
    list_parameter_specs,
)
from hlat.model.parameter_spec import Initialization, ParameterRole

LLAMA2_7B = ModelConfig("7b", 32, 4096, 11008, 32, 32, 32000)
LLAMA2_13B = ModelConfig("13b", 40, 5120, 13824, 40, 40, 32000)
LLAMA2_70B = ModelConfig("70b", 80, 8192, 28672, 64, 8, 32000)
LLAMA31_8B = ModelConfig("8b", 32, 4096, 14336, 32, 8, 128256)
LLAMA31_70B = ModelConfig("70b-3.1", 80, 8192, 28672, 64, 8, 128256)
TINY = ModelConfig("tiny", 2, 8, 12, 4, 2, 10)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA2_13B, 13_015_864_320),
        (LLAMA2_70B, 68_976_648_192),
        (LLAMA31_8B, 8_030_261_248),
    ],
)
def test_number_of_parameters(model: ModelConfig, count: int) -> None:
    assert count_parameters(model) == count


@pytest.mark.parametrize(
    ("model", "sequence_length", "gigaflops"),
    [
        (LLAMA2_7B, 4096, 42.86),
        (LLAMA2_13B, 4096, 82.1),
        (LLAMA2_70B, 4096, 428.4),
        (LLAMA31_8B, 8192, 51.47),
        (LLAMA31_70B, 8192, 449),
    ],
)
def test_flops_per_token(model: ModelConfig, sequence_length: int, gigaflops: float) -> None:
    assert compute_flops_per_token(model, sequence_length) / 1e9 == pytest.approx(
        gigaflops, rel=1e-3
    )


def test_names_and_shapes() -> None:
    shapes = {parameter.name: parameter.shape for parameter in list_parameter_specs(TINY)}
    assert len(shapes) == 2 * 9 + 3
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (10, 8)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (8, 8)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (4, 8)
    assert shapes["model.layers.1.mlp.up_proj.weight"] == (12, 8)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (8, 12)
    assert shapes["model.norm.weight"] == (8,)


def test_a_tied_head_is_no_parameter() -> None:
    tied = ModelConfig("tied", 2, 8, 12, 4, 2, 10, tie_embeddings=True)
    assert count_parameters(TINY) - count_parameters(tied) == 80
    assert "lm_head.weight" not in {parameter.name for parameter in list_parameter_specs(tied)}


@pytest.mark.parametrize(
    ("scaled", "factors"),
    [
        (ScaledInit.none, (1.0, 1.0)),
        (ScaledInit.depth, (0.5, 0.5)),
        (ScaledInit.layer, (1 / math.sqrt(2), 0.5)),
    ],
)
def test_initial_deviation(scaled: ScaledInit, factors: tuple[float, float]) -> None:
    model = ModelConfig("tiny", 2, 8, 12, 4, 2, 10, init_std=0.021, scaled_init=scaled)
    for parameter in list_parameter_specs(model):
        std = compute_init_std(parameter, model)
        if "norm" in parameter.name:
            assert parameter.init is Initialization.ones
        elif "o_proj" in parameter.name or "down_proj" in parameter.name:
            assert parameter.role is ParameterRole.residual
            assert parameter.layer is not None
            assert std == pytest.approx(0.021 * factors[parameter.layer])
        else:
            assert std == 0.021
