"""One loop or operator by operator: the same bits."""

import pytest
import torch

from hlat.config.model import Model
from hlat.engine.native.noise import Draw, make_noise
from hlat.engine.native.rounding import Rounding
from hlat.engine.shards import shard

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, as it compiles
SHAPES = [(64, 48), (1, 48), (64, 1), (37, 129)]


def draw(rows: int, width: int, count: int = 1) -> Draw:
    model = Model("big", 1, width, 8, 1, 1, rows)
    held = shard(model, "lm_head.weight", (rows, width), 1, 0)
    return make_noise(held, 1, torch.device("cpu")).draw(5 + torch.arange(count))


def rounded(given: list[torch.Tensor], compiled: bool) -> list[torch.Tensor]:
    rounding = Rounding(compiled)
    stack = rounding.take("values", len(given), given[0].shape, given[0].device)
    torch._foreach_copy_(stack.each, given)
    rounding.round_(stack, draw(*given[0].shape, len(given)), slice(None))
    return stack.each


def values(rows: int, width: int) -> torch.Tensor:
    """Any bits of fp32, which are numbers of every size, and infinities."""
    generator = torch.Generator().manual_seed(rows)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (rows, width), generator=generator)
    found = bits.to(torch.int32).view(torch.float32)
    found[0, :3] = torch.tensor([float("inf"), -0.0, 2.0**-149])[:width]
    return torch.where(found.isnan(), 0.0, found)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_compiled_loop_gives_the_same_bits(shape: tuple[int, int], count: int) -> None:
    given = [values(*shape).roll(i) for i in range(count)]
    torch.compiler.reset()  # more shapes than one run has, whatever was compiled here before
    for one, other in zip(rounded(given, True), rounded(given, False), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_tensor_keeps_nan(compiled: bool) -> None:
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -(1 << 23) + 1])
    given = payloads.to(torch.int32).view(torch.float32).repeat(64, 20)
    (found,) = rounded([given], compiled)
    assert found.bfloat16().isnan().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_rounded_elsewhere_stays_as_it_was(compiled: bool) -> None:
    source = values(64, 48)
    before, target = source.clone(), torch.empty(64, 48, dtype=torch.bfloat16)
    Rounding(compiled).write(target, source, draw(64, 48))
    assert torch.equal(source, before)
    (expected,) = rounded([before], compiled=False)
    assert torch.equal(target, expected.bfloat16())
