"""A permutation is a bijection that looks like chance and is the same everywhere."""

import itertools
from collections import Counter

import numpy as np
import pytest

from hlat.data.permutation import Permutation

GOLDEN = [9, 2, 0, 3, 5, 7, 8, 6, 1, 4]
POWERS = [2**k + d for k in range(10, 17) for d in (-1, 0, 1)]


def test_every_small_size_is_a_bijection() -> None:
    for size in range(1, 601):
        image = Permutation(size, ("small", 1))(np.arange(size))
        np.testing.assert_array_equal(np.sort(image), np.arange(size))


@pytest.mark.parametrize("size", POWERS)
def test_sizes_around_powers_of_two_are_bijections(size: int) -> None:
    assert 65_537 in POWERS
    image = Permutation(size, ("power", 2))(np.arange(size))
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


def test_neighbours_are_uncorrelated_over_a_million() -> None:
    image = Permutation(10**6, ("lag", 3))(np.arange(10**6)).astype(float)
    for lag in (1, 2, 64, 1024):
        assert abs(np.corrcoef(image[lag:], image[:-lag])[0, 1]) < 0.005


@pytest.mark.parametrize("start", [0, 123_456_789, 10**9 - 200_000])
def test_neighbours_are_uncorrelated_within_a_billion(start: int) -> None:
    window = Permutation(10**9, ("lag", 4))(np.arange(start, start + 200_000)).astype(float)
    assert abs(np.corrcoef(window[1:], window[:-1])[0, 1]) < 0.01
    counts, _ = np.histogram(window, bins=256, range=(0, 10**9))
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert 150 < chi_square < 380  # 255 +- 23


def test_orders_of_few_elements_are_equally_likely() -> None:
    keys = [Permutation(4, ("few", key)) for key in range(1200)]
    orders = Counter(tuple(permutation(i) for i in range(4)) for permutation in keys)
    counts = np.array([orders[order] for order in itertools.permutations(range(4))])
    assert ((counts - 50) ** 2 / 50).sum() < 50  # 23 +- 7


def test_key_and_size_choose_the_order() -> None:
    index = np.arange(1000)
    orders = {
        tuple(Permutation(1000, key)(index).tolist())
        for key in ((1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1))
    }
    orders.add(tuple(Permutation(1001, (1, "a", 0))(index).tolist()))
    assert len(orders) == 5


def test_order_never_changes() -> None:
    assert Permutation(10, ("golden", 7))(np.arange(10)).tolist() == GOLDEN


@pytest.mark.parametrize("size", [1, 2, 37, 4096, 10**9, 2**40 + 1])
def test_scalar_equals_vector(size: int) -> None:
    permutation = Permutation(size, ("scalar", 5))
    index = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
    image = permutation(index)
    assert image.dtype == np.int64
    assert image.tolist() == [permutation(int(i)) for i in index]
    assert permutation(index.reshape(-1, 1)).shape == (len(index), 1)


@pytest.mark.parametrize("index", [-1, 10, np.array([3, 10]), np.array([-1])])
def test_indices_outside_are_refused(index: int | np.ndarray) -> None:
    with pytest.raises(AssertionError):
        Permutation(10, ("range",))(index)
