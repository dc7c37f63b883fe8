"""Initial values are independent of the layout."""

import numpy as np
import pytest
from numpy.typing import NDArray

from hlat.config.model import ModelConfig
from hlat.model.decoder_spec import ScaledInit, compute_init_std, list_parameter_specs
from hlat.model.parameter_spec import ParameterRole, ParameterSpec, ShardingRule
from hlat.model.weight_initialization import RNG_BLOCK_SIZE, compute_initial_values

MODEL = ModelConfig("test", 2, 192, 640, 4, 2, 1031, init_std=0.021, scaled_init=ScaledInit.layer)
BY_NAME = {parameter.name: parameter for parameter in list_parameter_specs(MODEL)}
EMBEDDING = BY_NAME["model.embed_tokens.weight"]
DOWN = BY_NAME["model.layers.1.mlp.down_proj.weight"]


def full(parameter: ParameterSpec, seed: int = 7) -> NDArray[np.float32]:
    zeros = (0,) * len(parameter.shape)
    return compute_initial_values(parameter, MODEL, seed, zeros, parameter.shape)


@pytest.mark.parametrize("parameter", [EMBEDDING, DOWN], ids=lambda parameter: parameter.name)
def test_any_slice_equals_the_slice_of_the_full_tensor(parameter: ParameterSpec) -> None:
    everything = full(parameter)
    assert everything.size > RNG_BLOCK_SIZE
    generator = np.random.default_rng(0)
    for _ in range(60):
        ends = [sorted(generator.integers(0, n + 1, 2).tolist()) for n in parameter.shape]
        if generator.random() < 0.3:
            ends[1] = [0, parameter.shape[1]]
        (top, bottom), (left, right) = ends
        result = compute_initial_values(
            parameter, MODEL, 7, (top, left), (bottom - top, right - left)
        )
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, everything[top:bottom, left:right])


def test_columns_of_more_than_one_chunk() -> None:
    wide = ParameterSpec("wide", (1100, 4096), ParameterRole.matrix, ShardingRule.column)
    result = compute_initial_values(wide, MODEL, 7, (3, 4000), (1090, 96))
    everything = compute_initial_values(wide, MODEL, 7, (0, 0), wide.shape)
    np.testing.assert_array_equal(result, everything[3:1093, 4000:])


def test_norms_are_ones() -> None:
    norm = BY_NAME["model.norm.weight"]
    np.testing.assert_array_equal(full(norm), np.ones(192, np.float32))
    assert compute_initial_values(norm, MODEL, 7, (100,), (5,)).shape == (5,)


@pytest.mark.parametrize("parameter", [EMBEDDING, DOWN], ids=lambda parameter: parameter.name)
def test_mean_and_deviation(parameter: ParameterSpec) -> None:
    values = full(parameter).astype(np.float64)
    std = compute_init_std(parameter, MODEL)
    assert std is not None
    assert abs(values.mean()) < 4 * std / np.sqrt(values.size)
    assert abs(values.std() - std) < 4 * std / np.sqrt(2 * values.size)


def test_names_and_seeds_and_blocks_differ() -> None:
    gate = full(BY_NAME["model.layers.0.mlp.gate_proj.weight"])
    up = full(BY_NAME["model.layers.0.mlp.up_proj.weight"])
    other_seed = full(BY_NAME["model.layers.0.mlp.up_proj.weight"], seed=8)
    flat = full(EMBEDDING).ravel()
    for one, other in (
        (gate, up),
        (up, other_seed),
        (flat[:RNG_BLOCK_SIZE], flat[RNG_BLOCK_SIZE : 2 * RNG_BLOCK_SIZE]),
    ):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(one.size)


def test_golden_values() -> None:
    """Pin values, because a change alters the initial weights of every run."""
    result = compute_initial_values(EMBEDDING, MODEL, 12349, (0, 0), (1, 4))[0] / np.float32(0.021)
    np.testing.assert_allclose(result, GOLDEN_FIRST, rtol=1e-6)
    result = compute_initial_values(EMBEDDING, MODEL, 12349, (1030, 188), (1, 4))[0] / np.float32(
        0.021
    )
    np.testing.assert_allclose(result, GOLDEN_LAST, rtol=1e-6)


GOLDEN_FIRST = [0.567503, -1.180299, -0.6345365, 0.8839055]
GOLDEN_LAST = [0.4611227, 1.226394, 0.1695826, 0.7930545]
