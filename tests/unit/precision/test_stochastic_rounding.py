"""Compiled and eager stochastic rounding are bit-identical."""

import pytest
import torch

from hlat.config.model import ModelConfig
from hlat.distributed.parameter_shards import compute_shard
from hlat.engine.native.step_rounding import build_shard_generator
from hlat.model.embedding_spec import build_head
from hlat.precision.random_bits import RandomBits
from hlat.precision.stochastic_rounding import StochasticRounder

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
SHAPES = [(64, 48), (1, 48), (64, 1), (37, 129)]


def generate(rows: int, width: int, count: int = 1) -> RandomBits:
    model = ModelConfig("big", 1, width, 8, 1, 1, rows)
    shard = compute_shard(build_head(model), 1, 0)
    return build_shard_generator(shard, 1, torch.device("cpu")).generate(5 + torch.arange(count))


def round_all(values: list[torch.Tensor], backend: str | None) -> list[torch.Tensor]:
    rounder = StochasticRounder(backend)
    buffer = rounder.get_buffer("values", len(values), values[0].shape, values[0].device)
    torch._foreach_copy_(buffer.tensors, values)
    rounder.round_(buffer, generate(*values[0].shape, len(values)), slice(None))
    return buffer.tensors


def build_values(rows: int, width: int) -> torch.Tensor:
    """Return fp32 numbers of every magnitude, and infinities."""
    generator = torch.Generator().manual_seed(rows)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (rows, width), generator=generator)
    found = bits.to(torch.int32).view(torch.float32)
    found[0, :3] = torch.tensor([float("inf"), -0.0, 2.0**-149])[:width]
    return torch.where(found.isnan(), 0.0, found)


@pytest.mark.slow  # TorchInductor; tests/contract/test_blocks.py compiles whole steps
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_and_eager_are_bit_identical(shape: tuple[int, int], count: int) -> None:
    given = [build_values(*shape).roll(i) for i in range(count)]
    torch.compiler.reset()  # more shapes than torch.compile specializes for in one process
    for one, other in zip(round_all(given, "inductor"), round_all(given, None), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_first_tensor_keeps_nan(backend: str | None) -> None:
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -(1 << 23) + 1])
    given = payloads.to(torch.int32).view(torch.float32).repeat(64, 20)
    (found,) = round_all([given], backend)
    assert found.bfloat16().isnan().all()


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=pytest.mark.slow)])
def test_source_of_a_copy_is_unchanged(backend: str | None) -> None:
    source = build_values(64, 48)
    before, target = source.clone(), torch.empty(64, 48, dtype=torch.bfloat16)
    StochasticRounder(backend).copy_rounded_(target, source, generate(64, 48))
    assert torch.equal(source, before)
    (expected,) = round_all([before], backend=None)
    assert torch.equal(target, expected.bfloat16())


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_a_shard_without_elements_has_no_chunks(shape: tuple[int, ...]) -> None:
    empty = torch.empty(shape)
    assert list(StochasticRounder(False).iter_chunks(empty, empty.clone())) == []
