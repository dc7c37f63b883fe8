"""Stochastic rounding is exact for bf16 values, unbiased and independent of the layout."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hlat.config.model import ModelConfig
from hlat.distributed.parameter_shards import compute_shard
from hlat.engine.native.step_rounding import build_shard_generator
from hlat.model.attention_spec import AttentionConfig
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_module_parameters
from hlat.precision import stochastic_rounding
from hlat.precision.random_bits import (
    RandomBits,
    RandomBitsGenerator,
    build_random_bits_generator,
)
from tests.support.canonical_parameters import iter_canonical_views

MODEL = ModelConfig("test", 2, 48, 40, 4, 2, 131)
COUNTER = torch.tensor(7)


def tensors(model: ModelConfig = MODEL) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(weight, dtype=torch.bfloat16)
        for name, weight in Decoder(model).named_parameters()
    }


def build_generators(
    model: ModelConfig, seed: int, tensors: dict[str, torch.Tensor]
) -> dict[str, RandomBitsGenerator]:
    """Return the generators of full parameters by the name of a module parameter."""
    shards = {p.name: compute_shard(p, 1, 0) for p in list_module_parameters(model)}
    return {
        name: build_shard_generator(shards[name], seed, tensor.device)
        for name, tensor in tensors.items()
    }


def build_generator(
    name: str = "layers.1.mlp.gate_up_proj.weight", seed: int = 3
) -> RandomBitsGenerator:
    return build_generators(MODEL, seed, tensors())[name]


def generate_million(counters: torch.Tensor = COUNTER) -> RandomBits:
    """Return random bits of one million elements per counter."""
    big = ModelConfig("big", 1, 1000, 8, 1, 1, 1000)
    head = torch.empty(1000, 1000)
    return build_generators(big, 1, {"lm_head.weight": head})["lm_head.weight"].generate(counters)


def expand(bits: RandomBits) -> torch.Tensor:
    return stochastic_rounding.StochasticRounder().expand_random_bits(
        bits.row_keys, bits.column_keys
    )


def round_stochastically(values: torch.Tensor, bits: RandomBits) -> torch.Tensor:
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    stochastic_rounding.StochasticRounder().copy_rounded_(target, values, bits)
    return target


def find_adjacent(value: float) -> tuple[float, float]:
    """Return the bf16 values next to an fp32 number, the larger magnitude last."""
    bits = int(np.float32(value).view(np.uint32)) & 0xFFFF0000
    pair = np.array([bits, bits + 0x10000], np.uint32).view(np.float32)
    return float(pair[0]), float(pair[1])


SMALLEST = 2.0**-149
VALUES = [
    1.001,
    -1.001,
    3.14159,
    1.9999999,
    -0.0123,
    1e30,
    1.5 * 2.0**-133,  # subnormal in bf16, too
    -SMALLEST,
    65535 * SMALLEST,
    3.3895313892515355e38 * 1.0009,  # between the largest value of bf16 and infinity
]


@pytest.mark.parametrize("value", VALUES)
def test_the_mean_of_a_million_roundings_is_the_value(value: float) -> None:
    source = torch.full((1000, 1000), value)
    below, above = find_adjacent(source[0, 0].item())
    found = round_stochastically(source, generate_million()).double()
    ups = int((found == above).sum())
    assert ups + int((found == below).sum()) == 10**6
    bits = int(source[0, 0].view(torch.int32)) & 0xFFFF
    probability = bits / 65536
    deviation = math.sqrt(probability * (1 - probability) / 10**6)
    assert abs(ups / 10**6 - probability) < 4 * deviation


def test_bf16_values_are_unchanged() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = every.float().view(256, 256)
    found = round_stochastically(
        values,
        RandomBits(generate_million().row_keys[:, :256], generate_million().column_keys[:, :256]),
    ).view(-1)
    real = ~torch.isnan(every)
    assert torch.equal(found.view(torch.int16)[real], every.view(torch.int16)[real])
    assert torch.isnan(found[~real]).all()


def test_zeros_and_infinities_keep_their_sign() -> None:
    values = torch.tensor([[0.0, -0.0, math.inf, -math.inf] * 250] * 1000)
    assert torch.equal(
        round_stochastically(values, generate_million()).float().view(torch.int32),
        values.view(torch.int32),
    )


def test_no_nan_becomes_a_number() -> None:
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF], dtype=torch.int64)
    both_signs = torch.cat([payloads, payloads - (1 << 31)]).to(torch.int32)
    values = both_signs.view(torch.float32).repeat(1000, 125)
    assert torch.isnan(round_stochastically(values, generate_million())).all()


def test_random_bits_are_uniform_and_independent() -> None:
    three = expand(generate_million(torch.arange(3)))
    for tensor in three:
        assert tensor.min() >= 0
        assert tensor.max() < 1 << 16
        for byte in (tensor >> 8, tensor & 0xFF):
            counts = torch.bincount(byte.flatten(), minlength=256).double()
            chi_square = float(((counts - 10**6 / 256) ** 2 / (10**6 / 256)).sum())
            assert chi_square < 255 + 4 * math.sqrt(2 * 255)
        for lag in (1, 2, 256):
            assert abs(correlation(tensor[lag:], tensor[:-lag])) < 5e-3
            assert abs(correlation(tensor[:, lag:], tensor[:, :-lag])) < 5e-3
            assert abs(correlation(tensor[lag:, lag:], tensor[:-lag, :-lag])) < 6e-3
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(correlation(three[one], three[other])) < 4e-3


@pytest.mark.parametrize("probability", [1 / 2, 1 / 4, 0.99])
def test_norm_of_rounding_errors_of_a_matrix(probability: float) -> None:
    """Compare the norm of the errors with that of independent ones (Bai and Yin, Ann. Probab. 16, 1988)."""
    (bits,) = expand(generate_million())
    errors = (bits < probability * 65536).double() - probability
    independent = math.sqrt(probability * (1 - probability)) * 2 * math.sqrt(1000)
    assert float(torch.linalg.matrix_norm(errors, 2)) == pytest.approx(independent, rel=0.05)


@pytest.mark.slow
def test_elements_and_pairs_are_uncorrelated_over_counters() -> None:
    count = 1 << 14
    draws = expand(
        build_generator("layers.1.self_attn.o_proj.weight").generate(torch.arange(count))
    )
    values = draws.view(count, -1)[:, :400].double() / 65536 - 0.5
    means = values.sum(0) / math.sqrt(count / 12)
    later = (values[1:] * values[:-1]).sum(0) * 12 / math.sqrt(count)
    one, other = torch.triu_indices(400, 400, 1)
    pairs = (values.T @ values)[one, other] * 12 / math.sqrt(count)
    for deviations in (means, later, pairs):
        assert abs(float(deviations.square().mean()) - 1) < 4 * math.sqrt(2 / len(deviations))
        assert float(deviations.abs().max()) < math.sqrt(2 * math.log(len(deviations))) + 2


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    pair = torch.stack([one.flatten().double(), other.flatten().double()])
    return float(torch.corrcoef(pair)[0, 1])


def test_counters_tensors_and_seeds_differ() -> None:
    def bits(generator: RandomBitsGenerator, counter: int) -> torch.Tensor:
        return expand(generator.generate(torch.tensor(counter)))

    first = bits(build_generator(), 0)
    for other in (
        bits(build_generator(), 1),
        bits(build_generator("layers.0.mlp.gate_up_proj.weight"), 0),
        bits(build_generator(seed=4), 0),
    ):
        assert abs(correlation(first, other)) < 4 / math.sqrt(first.numel())


def test_golden_random_bits() -> None:
    """Pin the bits, because a change alters every run with stochastic rounding."""
    assert expand(build_generator().generate(torch.arange(2)))[:, :2, :2].tolist() == GOLDEN


GOLDEN = [[[58791, 22608], [6736, 52653]], [[35630, 58104], [49719, 53730]]]


@pytest.mark.parametrize("size", [1, 48 * 5, 1 << 17])
def test_result_is_independent_of_the_chunk_size(size: int, monkeypatch) -> None:
    values = torch.randn(80, 48)
    expected = round_stochastically(values, build_generator().generate(COUNTER))
    monkeypatch.setitem(stochastic_rounding._CHUNK_NUMEL, "cpu", size)
    assert torch.equal(round_stochastically(values, build_generator().generate(COUNTER)), expected)


def test_a_shard_is_rounded_like_its_part_of_the_full_tensor() -> None:
    values, generator = torch.randn(80, 48), build_generator()
    expected = round_stochastically(values, generator.generate(COUNTER))
    for rows, columns in ((slice(40, 80), slice(None)), (slice(None), slice(16, 32))):
        shard = RandomBitsGenerator(generator.row_keys[rows], generator.column_keys[:, columns])
        part = round_stochastically(values[rows, columns].contiguous(), shard.generate(COUNTER))
        assert torch.equal(part, expected[rows, columns])


def test_fused_weights_are_rounded_like_canonical_ones() -> None:
    named = tensors()
    generators = build_generators(MODEL, 3, named)
    for name, target in named.items():
        stochastic_rounding.StochasticRounder().copy_rounded_(
            target, torch.full(target.shape, 1.001), generators[name].generate(COUNTER)
        )
    grouped = dict(iter_canonical_views(MODEL, named))
    for canonical in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
        name = f"model.layers.0.{canonical}.weight"
        found = grouped[name].reshape(-1, 48)
        # As a separate tensor with the same canonical name
        alone = build_random_bits_generator([(name, 0, len(found))], (0, 48), 3, found.device)
        assert torch.equal(
            round_stochastically(torch.full(found.shape, 1.001), alone.generate(COUNTER)), found
        )


def test_fused_biases_are_rounded_like_canonical_ones() -> None:
    model = replace(MODEL, attention=AttentionConfig(qkv_bias=True))
    name = "layers.0.self_attn.qkv_proj.bias"
    bias = torch.zeros(96, dtype=torch.bfloat16)
    generator = build_generators(model, 3, {name: bias})[name]
    bias.copy_(round_stochastically(torch.full((96,), 1.004), generator.generate(COUNTER)))
    for canonical, view in iter_canonical_views(model, {name: bias}):
        found = view.reshape(-1)
        alone = build_random_bits_generator([(canonical, 0, len(found))], None, 3, bias.device)
        expected = round_stochastically(torch.full(found.shape, 1.004), alone.generate(COUNTER))
        assert torch.equal(found, expected)
        assert len(found.unique()) == 2


def test_a_vector_is_one_row() -> None:
    found = build_generators(MODEL, 3, tensors())["norm.weight"]
    assert found.row_keys.shape == (1, 1)
    assert found.column_keys.shape == (1, 48)


def test_a_sum_is_rounded_once() -> None:
    total = torch.full((1000, 1000), 1.0, dtype=torch.bfloat16)
    stochastic_rounding.StochasticRounder().add_rounded_(
        total, torch.full((1000, 1000), 2.0**-10, dtype=torch.bfloat16), generate_million()
    )
    fraction = float((total == 1 + 2.0**-7).double().mean())
    assert abs(fraction - 1 / 8) < 4 * math.sqrt(1 / 8 * 7 / 8 / 10**6)
