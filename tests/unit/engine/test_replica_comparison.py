"""The digest of a tensor changes with any bit."""

import pytest
import torch

from hlat.engine.replica_comparison import compute_digest

SHAPES = [(), (1,), (7,), (8,), (3, 5), (3, 4), (2, 3, 4)]
DTYPES = [torch.bfloat16, torch.float32]


def build_values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_bit_changes_the_digest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = build_values(shape, dtype)
    before = int(compute_digest(tensor))
    bits = tensor.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).view(-1)
    for index in range(bits.numel()):
        for number in range(8 * tensor.element_size()):
            flip = torch.tensor(1).bitwise_left_shift(number).to(bits.dtype)
            bits[index] ^= flip
            assert int(compute_digest(tensor)) != before
            bits[index] ^= flip
    assert int(compute_digest(tensor)) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_exchanged_rows_change_the_digest(dtype: torch.dtype) -> None:
    tensor = build_values((4, 6), dtype)
    assert compute_digest(tensor) != compute_digest(tensor[[1, 0, 2, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 8])
def test_strides_do_not_change_the_digest(dtype: torch.dtype, width: int) -> None:
    tensor = build_values((6, width), dtype)
    wide = torch.zeros(6, width + 3, dtype=dtype)
    wide[:, 1 : width + 1] = tensor
    assert compute_digest(wide[:, 1 : width + 1]) == compute_digest(tensor)
    assert compute_digest(tensor.t().contiguous().t()) == compute_digest(tensor)
