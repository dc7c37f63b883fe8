"""Stochastic rounding: exact, unbiased, the same whatever the layout, and right on what is odd."""

import math

import numpy as np
import pytest
import torch

from hlat.config.model import Model
from hlat.engine.native import noise, rounding
from hlat.engine.native.noise import Draw, Noise
from hlat.engine.shards import shard
from hlat.model.canonical_views import canonical_views
from hlat.model.llama import Llama

MODEL = Model("test", 2, 48, 40, 4, 2, 131)
NUMBER = torch.tensor(7)


def tensors(model: Model = MODEL) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(weight, dtype=torch.bfloat16)
        for name, weight in Llama(model).named_parameters()
    }


def make_noise(model: Model, seed: int, tensors: dict[str, torch.Tensor]) -> dict[str, Noise]:
    """The noise of whole parameters."""
    return {
        name: noise.make_noise(shard(model, name, tuple(tensor.shape), 1, 0), seed, tensor.device)
        for name, tensor in tensors.items()
    }


def some(name: str = "layers.1.mlp.gate_up_proj.weight", seed: int = 3) -> Noise:
    return make_noise(MODEL, seed, tensors())[name]


def wide(rows: int = 1000, width: int = 1000) -> Draw:
    """The bits of a million elements."""
    big = Model("big", 1, width, 8, 1, 1, rows)
    return make_noise(big, 1, {"lm_head.weight": torch.empty(rows, width)})["lm_head.weight"].draw(
        NUMBER
    )


def rounded(values: torch.Tensor, draw: Draw) -> torch.Tensor:
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    rounding.Rounding().write(target, values, draw)
    return target


def neighbours(value: float) -> tuple[float, float]:
    """The values of bf16 on both sides of an fp32 number, away from zero last."""
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
    below, above = neighbours(source[0, 0].item())
    found = rounded(source, wide()).double()
    ups = int((found == above).sum())
    assert ups + int((found == below).sum()) == 10**6
    bits = int(source[0, 0].view(torch.int32)) & 0xFFFF
    chance = bits / 65536
    assert abs(ups / 10**6 - chance) < 4 * math.sqrt(chance * (1 - chance) / 10**6)


def test_values_of_bf16_stay_what_they_are() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = every.float().view(256, 256)
    found = rounded(values, Draw(wide().rows[:256], wide().columns[:, :256])).view(-1)
    real = ~torch.isnan(every)
    assert torch.equal(found.view(torch.int16)[real], every.view(torch.int16)[real])
    assert torch.isnan(found[~real]).all()


def test_zeros_and_infinities_keep_their_sign() -> None:
    values = torch.tensor([[0.0, -0.0, math.inf, -math.inf] * 250] * 1000)
    assert torch.equal(rounded(values, wide()).float().view(torch.int32), values.view(torch.int32))


def test_no_nan_becomes_a_number() -> None:
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF], dtype=torch.int64)
    both_signs = torch.cat([payloads, payloads - (1 << 31)]).to(torch.int32)
    values = both_signs.view(torch.float32).repeat(1000, 125)
    assert torch.isnan(rounded(values, wide())).all()


def test_the_three_numbers_of_an_element_are_uniform_and_independent() -> None:
    ours = rounding.Rounding()
    numbers = [number.flatten() for number in ours.numbers(ours.bits(wide(), slice(None)))]
    for number in numbers:
        assert number.min() >= 0
        assert number.max() < 1 << 16
        for byte in (number >> 8, number & 0xFF):
            counts = torch.bincount(byte, minlength=256).double()
            chi_square = float(((counts - 10**6 / 256) ** 2 / (10**6 / 256)).sum())
            assert chi_square < 255 + 4 * math.sqrt(2 * 255)
        for lag in (1, 2, 1000, 1001):
            assert abs(correlation(number[lag:], number[:-lag])) < 4e-3
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(correlation(numbers[one], numbers[other])) < 4e-3


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])


def test_draws_tensors_and_seeds_differ() -> None:
    def bits(noise: Noise, number: int) -> torch.Tensor:
        return rounding.Rounding().bits(noise.draw(torch.tensor(number)), slice(None)).flatten()

    first = bits(some(), 0)
    for other in (
        bits(some(), 1),
        bits(some("layers.0.mlp.gate_up_proj.weight"), 0),
        bits(some(seed=4), 0),
    ):
        assert abs(correlation(first, other)) < 4 / math.sqrt(first.numel())


def test_the_same_draw_gives_the_same_bits() -> None:
    one, other = (rounding.Rounding().bits(some().draw(NUMBER), slice(None)) for _ in range(2))
    assert torch.equal(one, other)


def test_golden_bits() -> None:
    """A change of these changes every run with stochastic rounding."""
    bits = rounding.Rounding().bits(some().draw(NUMBER), slice(0, 2))[:, :2]
    assert bits.tolist() == GOLDEN


GOLDEN = [[1172587677, -1101341212], [591831994, -2009040830]]


@pytest.mark.parametrize("size", [1, 48 * 5, 1 << 17])
def test_the_size_of_a_chunk_does_not_matter(size: int, monkeypatch) -> None:
    values = torch.randn(80, 48)
    whole = rounded(values, some().draw(NUMBER))
    monkeypatch.setitem(rounding._CHUNK, "cpu", size)
    assert torch.equal(rounded(values, some().draw(NUMBER)), whole)


def test_a_shard_is_rounded_as_its_part_of_the_whole() -> None:
    values, whole = torch.randn(80, 48), some()
    found = rounded(values, whole.draw(NUMBER))
    for rows, columns in ((slice(40, 80), slice(None)), (slice(None), slice(16, 32))):
        shard = Noise(whole.rows[rows], whole.columns[:, columns])
        part = rounded(values[rows, columns].contiguous(), shard.draw(NUMBER))
        assert torch.equal(part, found[rows, columns])


def test_coalescing_does_not_matter() -> None:
    """Each canonical tensor is rounded as if it lay alone."""
    named = tensors()
    noises = make_noise(MODEL, 3, named)
    for name, target in named.items():
        rounding.Rounding().write(
            target, torch.full(target.shape, 1.001), noises[name].draw(NUMBER)
        )
    grouped = dict(canonical_views(MODEL, named))
    for canonical in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
        name = f"model.layers.0.{canonical}.weight"
        found = grouped[name].reshape(-1, 48)
        # As a tensor of its own, whose canonical name is the same
        alone = _alone(name, found.shape)
        assert torch.equal(rounded(torch.full(found.shape, 1.001), alone.draw(NUMBER)), found)


def _alone(canonical: str, shape: torch.Size) -> Noise:
    return make_noise(MODEL, 3, {canonical.removeprefix("model."): torch.empty(shape)})[
        canonical.removeprefix("model.")
    ]


def test_a_vector_is_one_row() -> None:
    found = make_noise(MODEL, 3, tensors())["norm.weight"]
    assert found.rows.shape == (1, 1)
    assert found.columns.shape == (1, 48)


def test_a_sum_is_rounded_once() -> None:
    total = torch.full((1000, 1000), 1.0, dtype=torch.bfloat16)
    rounding.Rounding().add(total, torch.full((1000, 1000), 2.0**-10, dtype=torch.bfloat16), wide())
    share = float((total == 1 + 2.0**-7).double().mean())
    assert abs(share - 1 / 8) < 4 * math.sqrt(1 / 8 * 7 / 8 / 10**6)
