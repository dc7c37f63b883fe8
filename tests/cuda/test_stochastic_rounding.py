"""Stochastic rounding on a device has the bits of the CPU."""

import pytest
import torch

from hlat.precision.random_bits import build_random_bits_generator
from hlat.precision.stochastic_rounding import StochasticRounder

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

ROWS, WIDTH = 300, 257
SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, 3.4e38, 1.0]


def compute_bits(device: str, compile_backend: str | None) -> dict[str, torch.Tensor]:
    """Return the bits of a rounded copy and of a rounded sum of the same values."""
    generator = torch.Generator().manual_seed(0)
    source, summand = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    source.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    keys = build_random_bits_generator(
        [("first", 0, 100), ("second", 7, 200)], (3, WIDTH), 1, torch.device(device)
    )
    bits = keys.generate(torch.tensor([1 << 20], device=device))
    rounder = StochasticRounder(compile_backend)
    copy = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
    rounder.copy_rounded_(copy, source.to(device), bits)
    total = source.to(device, torch.bfloat16)
    rounder.add_rounded_(total, summand.to(device, torch.bfloat16), bits)
    return {
        "keys": bits.row_keys.cpu(),
        "copy": copy.view(torch.int16).cpu(),
        "sum": total.view(torch.int16).cpu(),
    }


@pytest.mark.parametrize("compile_backend", [None, "inductor"])
def test_bits_equal_the_cpu(device, compile_backend) -> None:
    found, expected = compute_bits(device, compile_backend), compute_bits("cpu", None)
    for name, bits in expected.items():
        assert torch.equal(found[name], bits), name
