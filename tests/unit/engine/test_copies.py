"""A digest of a tensor is another one when any of its bits is."""

import pytest
import torch

from hlat.engine.copies import digest

SHAPES = [(), (1,), (7,), (8,), (3, 5), (3, 4), (2, 3, 4)]
DTYPES = [torch.bfloat16, torch.float32]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_bit_changes_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = values(shape, dtype)
    before = int(digest(tensor))
    bits = tensor.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).view(-1)
    for index in range(bits.numel()):
        for number in range(8 * tensor.element_size()):
            flip = torch.tensor(1).bitwise_left_shift(number).to(bits.dtype)
            bits[index] ^= flip
            assert int(digest(tensor)) != before
            bits[index] ^= flip
    assert int(digest(tensor)) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_change_places_change_it(dtype: torch.dtype) -> None:
    tensor = values((4, 6), dtype)
    assert digest(tensor) != digest(tensor[[1, 0, 2, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 8])
def test_how_a_tensor_lies_in_memory_does_not(dtype: torch.dtype, width: int) -> None:
    tensor = values((6, width), dtype)
    wide = torch.zeros(6, width + 3, dtype=dtype)
    wide[:, 1 : width + 1] = tensor
    assert digest(wide[:, 1 : width + 1]) == digest(tensor)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
