"""Known answers are known, and one wrong element in millions is found."""

import numpy as np
import pytest
import torch

from hlat.config.precision import Dtype
from hlat.engine import examination
from hlat.engine.dtypes import DTYPES

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [64, 256])
def test_the_answer_is_the_product_in_integers(size: int) -> None:
    one, other, expected = (array.astype(np.int64) for array in examination.problem(size))
    assert (one @ other == expected).all()
    assert len(np.unique(expected)) > 30


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("size", [256, 4096])
def test_every_number_is_exact_in_every_dtype(size: int, dtype: torch.dtype) -> None:
    for array in examination.problem(size):
        exact = torch.from_numpy(array)
        assert torch.equal(exact.to(dtype).float(), exact)


@pytest.mark.parametrize("recipe", [Dtype.fp32, Dtype.bf16])
def test_a_sound_device_has_no_wrong_element(recipe: Dtype) -> None:
    count, num_wrong, flops_per_s = examination.burn_in(CPU, DTYPES[recipe])
    assert num_wrong == 0
    assert count > 1
    assert flops_per_s > 1e6


@pytest.mark.parametrize("value", [None, float("nan")])
@pytest.mark.parametrize("bad_call", [1, 5])
def test_one_wrong_element_in_one_product_is_found(monkeypatch, bad_call, value) -> None:
    calls = []

    def product(one, other):
        calls.append(0)
        result = one @ other
        if len(calls) == bad_call:
            result[100, 37] = result[100, 37] + 1 if value is None else value
        return result

    monkeypatch.setattr(examination, "_product", product)
    assert examination.burn_in(CPU, torch.bfloat16)[1] == 1


def test_a_device_that_cannot_compare_is_found(monkeypatch) -> None:
    class Blind(torch.Tensor):
        def __ne__(self, other):
            return torch.zeros(self.shape, dtype=torch.bool)

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    monkeypatch.setattr(
        examination, "_product", lambda one, other: (one @ other + 1).as_subclass(Blind)
    )
    assert examination.burn_in(CPU, torch.float32)[1] == 256 * 256


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_each_pair_of_neighbours_meets_once(size: int) -> None:
    ring = examination._ring(size)
    assert len({tuple(pair) for pair in ring}) == len(ring) == (1 if size == 2 else size)
    counts = [sum(rank in pair for pair in ring) for rank in range(size)]
    assert counts == [1 if size == 2 else 2] * size
