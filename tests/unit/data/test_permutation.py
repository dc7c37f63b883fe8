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
"""Probability that one z-score of a test exceeds its limit although the order is random. Keys are
fixed, so the tests are deterministic."""
SIZES = [10**6, 10**7, 10**8, 10**9, 4 * 10**9]
SEEDS = [0, 7, 42]
LAGS = [1, 2, 3, 16, 256, 4096, 16384]
BLOCK = 1 << 16

Positions = NDArray[np.int64]


def is_bijective(size: int) -> bool:
    """Return True if the `size` images contain every element of range(size)."""
    permutation, hit = Permutation(size, ("bijective", 2)), np.zeros(size, bool)
    for start in range(0, size, BLOCK):
        hit[permutation(np.arange(start, min(start + BLOCK, size)))] = True
    return bool(hit.all())


def get_edge_sizes(first: int, last: int) -> list[int]:
    """Return powers of two, plus and minus one; 4**k + 1 has the longest cycle walks."""
    return [2**k + d for k in range(first, last + 1) for d in (-1, 0, 1)]


def get_z_limit(num_scores: int) -> float:
    """Return the limit that standard normal scores exceed with probability ALPHA (Bonferroni)."""
    return NormalDist().inv_cdf(1 - ALPHA / 2 / num_scores)


def compute_z_score(chi_square: float, dof: int) -> float:
    """Return a standard normal score of random counts (Wilson and Hilferty's cube root)."""
    return float(((chi_square / dof) ** (1 / 3) - 1 + 2 / (9 * dof)) / np.sqrt(2 / (9 * dof)))


def score_correlations(positions: Positions, size: int) -> list[float]:
    """Score the correlation of images at each lag."""
    u = positions / size - 0.5
    return [float(12 * u[lag:] @ u[:-lag] / np.sqrt(len(u) - lag)) for lag in LAGS]


def score_pairs(positions: Positions, size: int) -> list[float]:
    """Score the independence of images at each lag, by counts of pairs of sixteenths."""
    sixteenth = positions * 16 // size
    z_scores = []
    for lag in LAGS:
        counts = np.bincount(sixteenth[lag:] * 16 + sixteenth[:-lag], minlength=256)
        expected = (len(positions) - lag) / 256
        z_scores.append(compute_z_score(((counts - expected) ** 2 / expected).sum(), 255))
    return z_scores


def score_distances(positions: Positions, size: int) -> list[float]:
    """Score the mean distance of m consecutive images: 1/3, with variance 1/15m."""
    apart = np.abs(np.diff(positions)) / size
    return [float((apart.mean() - 1 / 3) * np.sqrt(15 * len(apart)))]


def score_blocks(positions: Positions, size: int) -> list[float]:
    """Score the counts of the first 65,536 images, without replacement, in 256 blocks."""
    positions = positions[:65_536]
    counts = np.bincount(positions * 256 // size, minlength=256)
    chi_square = ((counts - 256) ** 2 / 256).sum() / (1 - len(positions) / size)
    return [compute_z_score(chi_square, 255)]


def score_batches(positions: Positions, size: int) -> list[float]:
    """Score the counts of batches of 256 images in 256 blocks.

    The chi square of a batch has mean 255 and variance 2 * 255 * 255 / 256.
    """
    count = len(positions) // 256
    block = positions[: count * 256].reshape(count, 256) * 256 // size
    counts = np.bincount((block + np.arange(count)[:, None] * 256).ravel(), minlength=count * 256)
    chi_square = ((counts - 1) ** 2).sum()
    return [float((chi_square - 255 * count) / np.sqrt(2 * 255 * 255 / 256 * count))]


STATISTICS = [score_correlations, score_pairs, score_distances, score_blocks, score_batches]
Statistic = Callable[[Positions, int], list[float]]


def permute_range(size: int, seed: int, start: int, count: int = 200_000) -> Positions:
    return Permutation(size, ("epoch", seed, "code", 0))(np.arange(start, start + count))


def compute_z_scores(
    statistic: Statistic, windows: Sequence[tuple[int, Positions]]
) -> NDArray[Any]:
    return np.abs([f for size, positions in windows for f in statistic(positions, size)])


@pytest.fixture(scope="module")
def windows() -> list[tuple[int, Positions]]:
    """Return sizes and consecutive images from the start, the middle and the end of an epoch."""
    starts = [lambda n: 0, lambda n: n // 3, lambda n: n - 200_000]
    return [
        (size, permute_range(size, seed, start(size)))
        for size in SIZES
        for seed, start in zip(SEEDS, starts, strict=True)
    ]


@pytest.fixture
def two_rounds() -> Iterator[None]:
    """Use a Feistel network with too few rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation_module, "NUM_ROUNDS", 2)
        yield


@pytest.mark.slow
def test_small_sizes_are_bijections() -> None:
    for size in range(1, 4097):
        assert is_bijective(size), size


@pytest.mark.slow
def test_sizes_around_powers_of_two_are_bijections() -> None:
    assert {65_537, 262_145, 1_048_577} <= set(get_edge_sizes(13, 20))
    for size in get_edge_sizes(13, 20):
        assert is_bijective(size), size


@pytest.mark.slow
@pytest.mark.parametrize("size", get_edge_sizes(21, 24))
def test_large_sizes_around_powers_of_two_are_bijections(size: int) -> None:
    assert is_bijective(size)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_consecutive_images_are_pseudorandom(
    windows: list[tuple[int, Positions]], statistic: Statistic
) -> None:
    z_scores = compute_z_scores(statistic, windows)
    assert z_scores.max() < get_z_limit(len(z_scores))


@pytest.mark.slow
@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_million_consecutive_images_are_pseudorandom(statistic: Statistic) -> None:
    samples = [
        (size, permute_range(size, seed, 0, 10**6)) for size in SIZES[1:] for seed in range(8)
    ]
    z_scores = compute_z_scores(statistic, samples)
    assert z_scores.max() < get_z_limit(len(z_scores))


@pytest.mark.usefixtures("two_rounds")
@pytest.mark.parametrize("statistic", STATISTICS)
def test_statistics_detect_two_rounds(statistic: Statistic) -> None:
    z_scores = compute_z_scores(statistic, [(10**6, permute_range(10**6, 0, 0))])
    assert z_scores.max() > get_z_limit(len(SIZES) * len(SEEDS) * len(LAGS))


@pytest.mark.parametrize(
    "statistic", [score_correlations, score_pairs, score_distances, score_batches]
)
def test_statistics_detect_permutations_of_blocks(statistic: Statistic) -> None:
    """Permute groups of eight, such as blocks of a file."""
    index = np.arange(200_000)
    positions = Permutation(125_000, ("stretches",))(index // 8) * 8 + index % 8
    assert compute_z_scores(statistic, [(10**6, positions)]).max() > get_z_limit(
        len(SIZES) * len(SEEDS) * len(LAGS)
    )


def test_first_images_of_a_key_are_not_clustered() -> None:
    """Compare with P(range of eight uniform samples < r) = 8 r^7 - 7 r^8."""
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
    assert abs(compute_z_score(((counts - 40) ** 2 / 40).sum(), 9)) < get_z_limit(1)


def compute_z_score_of_pairs(count: int) -> float:
    """Score the counts of the images of 0 and 128 in pairs of sixteenths, over many keys.

    Each pair of different sixteenths has 256 of the 65,280 ordered pairs, of equal ones 240.
    """
    index = np.array([0, 128])
    sixteenth = np.array([Permutation(256, ("few", key))(index) for key in range(count)]) // 16
    counts = np.bincount(sixteenth[:, 0] * 16 + sixteenth[:, 1], minlength=256).reshape(16, 16)
    expected = (256 - 16 * np.eye(16)) * count / 65_280
    return compute_z_score(((counts - expected) ** 2 / expected).sum(), 255)


def test_images_of_small_permutations_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two indices with equal right halves in the smallest network: four rounds are too few."""
    assert abs(compute_z_score_of_pairs(2500)) < get_z_limit(1)
    monkeypatch.setattr(permutation_module, "NUM_ROUNDS", 4)
    assert compute_z_score_of_pairs(2500) > 2 * get_z_limit(1)


KEYS = [
    ("epoch", seed, name, epoch)
    for seed in (0, 1)
    for name in ("code", "prose")
    for epoch in (0, 1)
]


@pytest.mark.parametrize("size", [10**6, 10**9])
def test_orders_of_different_keys_are_uncorrelated(size: int) -> None:
    positions = [Permutation(size, key)(np.arange(100_000)) for key in KEYS]
    z_scores = []
    for one, other in itertools.combinations(positions, 2):
        u, v = one / size - 0.5, other / size - 0.5
        z_scores.append(12 * u @ v / np.sqrt(len(u)))
        counts = np.bincount(one * 16 // size * 16 + other * 16 // size, minlength=256)
        expected = len(one) / 256
        z_scores.append(compute_z_score(((counts - expected) ** 2 / expected).sum(), 255))
        assert (one == other).mean() < 1e-4
    assert np.abs(z_scores).max() < get_z_limit(len(z_scores))


def test_ten_billion_elements_use_no_memory() -> None:
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


@pytest.mark.slow
def test_orders_of_few_elements_are_equally_likely() -> None:
    keys = [Permutation(4, ("few", key)) for key in range(1200)]
    orders = Counter(tuple(permutation(i) for i in range(4)) for permutation in keys)
    counts = np.array([orders[order] for order in itertools.permutations(range(4))])
    assert ((counts - 50) ** 2 / 50).sum() < 50  # 23 +- 7


def test_order_depends_on_key_and_size() -> None:
    index = np.arange(1000)
    orders = {
        tuple(Permutation(1000, key)(index).tolist())
        for key in ((1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1))
    }
    orders.add(tuple(Permutation(1001, (1, "a", 0))(index).tolist()))
    assert len(orders) == 5


def test_order_is_stable() -> None:
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
def test_out_of_range_indices_are_rejected(index: int | np.ndarray) -> None:
    with pytest.raises(AssertionError):
        Permutation(10, ("range",))(index)
