"""Test that a permutation is bijective, pseudorandom and platform independent."""

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hlat.data import permutation as permutation_module
from hlat.data.permutation import Permutation

GOLDEN = [9, 2, 0, 3, 5, 7, 8, 6, 1, 4]
ALPHA = 1e-3
"""Chance that one of a test's figures leaves its limit although the order is chance itself. Keys
are fixed, so a test that passes always passes."""
SIZES = [10**6, 10**7, 10**8, 10**9, 4 * 10**9]
SEEDS = [0, 7, 42]
LAGS = [1, 2, 3, 16, 256, 4096, 16384]
BLOCK = 1 << 16

Positions = NDArray[np.int64]


def is_bijective(size: int) -> bool:
    """Whether every element of range(size) is hit; `size` images cannot then hit one twice."""
    permutation, hit = Permutation(size, ("bijective", 2)), np.zeros(size, bool)
    for start in range(0, size, BLOCK):
        hit[permutation(np.arange(start, min(start + BLOCK, size)))] = True
    return bool(hit.all())


def powers(first: int, last: int) -> list[int]:
    """Powers of two and their neighbours; 4**k + 1 costs the longest walks."""
    return [2**k + d for k in range(first, last + 1) for d in (-1, 0, 1)]


def limit(num_figures: int) -> float:
    """What none of so many standard normal figures exceeds, but with probability ALPHA
    (Bonferroni)."""
    return NormalDist().inv_cdf(1 - ALPHA / 2 / num_figures)


def chi_square_figure(chi_square: float, dof: int) -> float:
    """Standard normal if the counts are chance (Wilson and Hilferty's cube root)."""
    return float(((chi_square / dof) ** (1 / 3) - 1 + 2 / (9 * dof)) / np.sqrt(2 / (9 * dof)))


def correlations(drawn: Positions, size: int) -> list[float]:
    """Draws at a lag are uncorrelated."""
    u = drawn / size - 0.5
    return [float(12 * u[lag:] @ u[:-lag] / np.sqrt(len(u) - lag)) for lag in LAGS]


def pairs(drawn: Positions, size: int) -> list[float]:
    """A draw says nothing about the one at a lag, by any curve: sixteenths against sixteenths."""
    sixteenth = drawn * 16 // size
    figures = []
    for lag in LAGS:
        counts = np.bincount(sixteenth[lag:] * 16 + sixteenth[:-lag], minlength=256)
        expected = (len(drawn) - lag) / 256
        figures.append(chi_square_figure(((counts - expected) ** 2 / expected).sum(), 255))
    return figures


def distances(drawn: Positions, size: int) -> list[float]:
    """Two uniform draws are a third apart; of m distances in a row the mean has variance 1/15m."""
    apart = np.abs(np.diff(drawn)) / size
    return [float((apart.mean() - 1 / 3) * np.sqrt(15 * len(apart)))]


def blocks(drawn: Positions, size: int) -> list[float]:
    """The first 65,536 draws fall evenly on 256 blocks, as far as chance without replacement does."""
    drawn = drawn[:65_536]
    counts = np.bincount(drawn * 256 // size, minlength=256)
    chi_square = ((counts - 256) ** 2 / 256).sum() / (1 - len(drawn) / size)
    return [chi_square_figure(chi_square, 255)]


def batches(drawn: Positions, size: int) -> list[float]:
    """Batches of 256 draws fall on 256 blocks neither too evenly nor too unevenly.

    Of one batch, chi square has mean 255 and variance 2 * 255 * 255 / 256.
    """
    count = len(drawn) // 256
    block = drawn[: count * 256].reshape(count, 256) * 256 // size
    counts = np.bincount((block + np.arange(count)[:, None] * 256).ravel(), minlength=count * 256)
    chi_square = ((counts - 1) ** 2).sum()
    return [float((chi_square - 255 * count) / np.sqrt(2 * 255 * 255 / 256 * count))]


STATISTICS = [correlations, pairs, distances, blocks, batches]
Statistic = Callable[[Positions, int], list[float]]


def window(size: int, seed: int, start: int, count: int = 200_000) -> Positions:
    return Permutation(size, ("epoch", seed, "code", 0))(np.arange(start, start + count))


def figures_of(statistic: Statistic, windows: Sequence[tuple[int, Positions]]) -> NDArray[Any]:
    return np.abs([f for size, drawn in windows for f in statistic(drawn, size)])


@pytest.fixture(scope="module")
def windows() -> list[tuple[int, Positions]]:
    """Size and consecutive draws: from the beginning, the middle and the end of an epoch."""
    starts = [lambda n: 0, lambda n: n // 3, lambda n: n - 200_000]
    return [
        (size, window(size, seed, start(size)))
        for size in SIZES
        for seed, start in zip(SEEDS, starts, strict=True)
    ]


@pytest.fixture
def two_rounds() -> Iterator[None]:
    """A Feistel network with too few rounds for a shuffle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation_module, "NUM_ROUNDS", 2)
        yield


def test_every_small_size_is_a_bijection() -> None:
    for size in range(1, 4097):
        assert is_bijective(size), size


def test_sizes_around_powers_of_two_are_bijections() -> None:
    assert {65_537, 262_145, 1_048_577} <= set(powers(13, 20))
    for size in powers(13, 20):
        assert is_bijective(size), size


@pytest.mark.slow
@pytest.mark.parametrize("size", powers(21, 24))
def test_large_sizes_around_powers_of_two_are_bijections(size: int) -> None:
    assert is_bijective(size)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_consecutive_draws_look_like_chance(
    windows: list[tuple[int, Positions]], statistic: Statistic
) -> None:
    figures = figures_of(statistic, windows)
    assert figures.max() < limit(len(figures))


@pytest.mark.slow
@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_million_consecutive_draws_look_like_chance(statistic: Statistic) -> None:
    drawn = [(size, window(size, seed, 0, 10**6)) for size in SIZES[1:] for seed in range(8)]
    figures = figures_of(statistic, drawn)
    assert figures.max() < limit(len(figures))


@pytest.mark.usefixtures("two_rounds")
@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_statistic_finds_out_two_rounds(statistic: Statistic) -> None:
    figures = figures_of(statistic, [(10**6, window(10**6, 0, 0))])
    assert figures.max() > limit(len(SIZES) * len(SEEDS) * len(LAGS))


@pytest.mark.parametrize("statistic", [correlations, pairs, distances, batches])
def test_statistics_find_out_neighbours_that_stay_together(statistic: Statistic) -> None:
    """Permute groups of eight, such as blocks of a file."""
    index = np.arange(200_000)
    drawn = Permutation(125_000, ("stretches",))(index // 8) * 8 + index % 8
    assert figures_of(statistic, [(10**6, drawn)]).max() > limit(
        len(SIZES) * len(SEEDS) * len(LAGS)
    )


def test_the_first_draws_of_a_key_are_not_clustered() -> None:
    """The range r of eight uniform draws lies below r with probability 8 r^7 - 7 r^8."""
    first = np.arange(8)
    ranges = np.array(
        [
            np.ptp(Permutation(n, ("epoch", s, "code", 0))(first)) / n
            for n in SIZES
            for s in range(80)
        ]
    )
    probability = 8 * ranges**7 - 7 * ranges**8
    assert probability.min() > ALPHA / len(ranges)
    counts = np.bincount((probability * 10).astype(int), minlength=10)
    assert abs(chi_square_figure(((counts - 40) ** 2 / 40).sum(), 9)) < limit(1)


def two_draws(count: int) -> float:
    """How evenly draws 0 and 128 of 256 under many keys fall on pairs of sixteenths, as a figure.

    Of the 65,280 ordered pairs of two numbers, 256 lie in a pair of different sixteenths and 240 in
    a pair of equal ones.
    """
    index = np.array([0, 128])
    sixteenth = np.array([Permutation(256, ("few", key))(index) for key in range(count)]) // 16
    counts = np.bincount(sixteenth[:, 0] * 16 + sixteenth[:, 1], minlength=256).reshape(16, 16)
    expected = (256 - 16 * np.eye(16)) * count / 65_280
    return chi_square_figure(((counts - expected) ** 2 / expected).sum(), 255)


def test_draws_of_a_small_source_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the smallest network, the two share their right half; four rounds are too few there."""
    assert abs(two_draws(2500)) < limit(1)
    monkeypatch.setattr(permutation_module, "NUM_ROUNDS", 4)
    assert two_draws(2500) > 2 * limit(1)


KEYS = [
    ("epoch", seed, name, epoch)
    for seed in (0, 1)
    for name in ("code", "prose")
    for epoch in (0, 1)
]


@pytest.mark.parametrize("size", [10**6, 10**9])
def test_orders_of_different_keys_have_nothing_in_common(size: int) -> None:
    drawn = [Permutation(size, key)(np.arange(100_000)) for key in KEYS]
    figures = []
    for one, other in itertools.combinations(drawn, 2):
        u, v = one / size - 0.5, other / size - 0.5
        figures.append(12 * u @ v / np.sqrt(len(u)))
        counts = np.bincount(one * 16 // size * 16 + other * 16 // size, minlength=256)
        expected = len(one) / 256
        figures.append(chi_square_figure(((counts - expected) ** 2 / expected).sum(), 255))
        assert (one == other).mean() < 1e-4
    assert np.abs(figures).max() < limit(len(figures))


def test_ten_billion_elements_cost_no_memory() -> None:
    index = np.arange(10**10 - 100, 10**10)
    Permutation(10, ("warm",))(index[:1] % 10)
    tracemalloc.start()
    permutation = Permutation(10**10, ("memory", 6))
    image = permutation(10**10 - 1)
    images = permutation(index)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert images[-1] == image
    assert peak < 100_000


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
