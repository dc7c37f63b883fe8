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


def wide(numbers: torch.Tensor = NUMBER) -> Draw:
    """The numbers of a million elements, or of several tensors of them."""
    big = Model("big", 1, 1000, 8, 1, 1, 1000)
    head = torch.empty(1000, 1000)
    return make_noise(big, 1, {"lm_head.weight": head})["lm_head.weight"].draw(numbers)


def numbers_of(draw: Draw) -> torch.Tensor:
    return rounding.Rounding().numbers(draw.rows, draw.columns)


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
    found = rounded(values, Draw(wide().rows[:, :256], wide().columns[:, :256])).view(-1)
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


def test_numbers_are_uniform_and_independent() -> None:
    three = numbers_of(wide(torch.arange(3)))
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


@pytest.mark.parametrize("share", [1 / 2, 1 / 4, 0.99])
def test_roundings_of_a_matrix_add_up_to_no_direction(share: float) -> None:
    """The norm of the errors is that of independent ones (Bai and Yin, Ann. Probab. 16, 1988)."""
    (number,) = numbers_of(wide())
    errors = (number < share * 65536).double() - share
    independent = math.sqrt(share * (1 - share)) * 2 * math.sqrt(1000)
    assert float(torch.linalg.matrix_norm(errors, 2)) == pytest.approx(independent, rel=0.05)


def test_over_the_draws_every_element_and_pair_of_elements_is_like_chance() -> None:
    count = 1 << 14
    draws = numbers_of(some("layers.1.self_attn.o_proj.weight").draw(torch.arange(count)))
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


def test_draws_tensors_and_seeds_differ() -> None:
    def bits(noise: Noise, number: int) -> torch.Tensor:
        return numbers_of(noise.draw(torch.tensor(number)))

    first = bits(some(), 0)
    for other in (
        bits(some(), 1),
        bits(some("layers.0.mlp.gate_up_proj.weight"), 0),
        bits(some(seed=4), 0),
    ):
        assert abs(correlation(first, other)) < 4 / math.sqrt(first.numel())


def test_golden_numbers() -> None:
    """A change of these changes every run with stochastic rounding."""
    assert numbers_of(some().draw(torch.arange(2)))[:, :2, :2].tolist() == GOLDEN


GOLDEN = [[[58791, 22608], [6736, 52653]], [[35630, 58104], [49719, 53730]]]


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
