"""Measure randomness and time per index of shuffles: ours, Grain's and NumPy's.

Usage: PYTHONPATH=. python benchmarks/data/shuffle.py   (prints a table, writes shuffle.json)

Grain is included if it is installed (pip install grain). NumPy is the reference: a permutation of
up to 10^7 elements, above that independent samples, because a permutation of n elements needs 8 n
bytes.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.data.permutation import Permutation

HERE = Path(__file__).resolve().parent
SIZES = [10**6, 10**7, 10**8, 10**9, 4 * 10**9]
SEEDS = [0, 7, 42]
NUM_SAMPLES = 200_000
POWERS = [2 ** (2 * k) + 1 for k in range(4, 12)]
REPETITIONS = 11
TIMED_SIZE = 10**7
Shuffle = Callable[[int, int, int], NDArray[np.int64]]
"""Returns the first `count` elements of a permutation, given size, seed and count."""


def ours(size: int, seed: int, count: int) -> NDArray[np.int64]:
    return Permutation(size, ("epoch", seed, "code", 0))(np.arange(count))


def ours_scalar(size: int, seed: int, count: int) -> NDArray[np.int64]:
    permutation = Permutation(size, ("epoch", seed, "code", 0))
    return np.array([permutation(i) for i in range(count)])


def numpy_shuffle(size: int, seed: int, count: int) -> NDArray[np.int64]:
    generator = np.random.default_rng(seed)
    if size <= 10**7:
        return generator.permutation(size)[:count]
    return generator.integers(0, size, count)


def import_grain_shuffle() -> Shuffle | None:
    """Return the function of grain.MapDataset.shuffle, after a comparison; None without grain."""
    try:
        import grain
        from grain._src.python.experimental.index_shuffle.python import index_shuffle_module
    except ImportError:
        return None

    def shuffle(size: int, seed: int, count: int) -> NDArray[np.int64]:
        index_shuffle = index_shuffle_module.index_shuffle
        indices = [index_shuffle(i, max_index=size - 1, seed=seed, rounds=4) for i in range(count)]
        return np.array(indices, np.int64)

    public = grain.MapDataset.range(10**9).shuffle(seed=0)
    assert shuffle(10**9, 0, 100).tolist() == [public[i] for i in range(100)]
    return shuffle


def quality(shuffle: Shuffle, size: int) -> dict[str, list[float]]:
    """Return four statistics, with a value per seed.

    Random orders have 0 +- 0.002, 0 +- 0.002, 0.3333 +- 0.0006 and 1 +- 0.003.
    """
    figures: dict[str, list[float]] = {
        name: [] for name in ("lag_1", "lag_16384", "distance", "chi2_per_dof")
    }
    for seed in SEEDS:
        sample = shuffle(size, seed, NUM_SAMPLES)
        count = NUM_SAMPLES // 256
        cell = sample[: count * 256].reshape(count, 256) * 256 // size
        counts = np.bincount(
            (cell + np.arange(count)[:, None] * 256).ravel(), minlength=count * 256
        )
        for lag in (1, 16384):
            figures[f"lag_{lag}"].append(np.corrcoef(sample[lag:], sample[:-lag])[0, 1])
        figures["distance"].append(np.abs(np.diff(sample)).mean() / size)
        figures["chi2_per_dof"].append(((counts - 1) ** 2).sum() / (255 * count))
    return {name: [round(float(value), 4) for value in values] for name, values in figures.items()}


def first_elements(shuffle: Shuffle, size: int) -> list[float]:
    return [round(float(value) / size, 4) for value in shuffle(size, SEEDS[0], 8)]


def count_missing(shuffle: Shuffle, size: int) -> int:
    """Count the elements that are missing in a complete epoch."""
    return size - len(np.unique(shuffle(size, SEEDS[0], size)))


def nanoseconds(contestants: dict[str, tuple[Shuffle, int]]) -> dict[str, dict[str, float]]:
    """Measure CPU time per index; contestants alternate, and the first round is a warm-up."""
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(REPETITIONS + 1):
        for name, (shuffle, count) in contestants.items():
            start = time.process_time()
            shuffle(TIMED_SIZE, repetition, count)
            if repetition:
                measured[name].append((time.process_time() - start) / count * 1e9)
    return {
        name: {
            "median": round(statistics.median(times), 1),
            "min": round(min(times), 1),
            "max": round(max(times), 1),
        }
        for name, times in measured.items()
    }


def main() -> None:
    grain = import_grain_shuffle()
    shuffles: dict[str, Shuffle] = {"hlat": ours, "numpy": numpy_shuffle}
    shuffles |= {"grain": grain} if grain else {}
    timed: dict[str, tuple[Shuffle, int]] = {
        "hlat, blocks of 65536": (ours, 1 << 16),
        "hlat, one by one": (ours_scalar, 1 << 12),
        "numpy, whole shuffle": (numpy_shuffle, TIMED_SIZE),
    }
    if grain:
        timed["grain, one by one"] = (grain, 1 << 14)
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "numpy": metadata.version("numpy"),
        "grain": metadata.version("grain") if grain else None,
        "seeds": SEEDS,
        "consecutive_draws": NUM_SAMPLES,
        "quality": {
            name: {str(size): quality(shuffle, size) for size in SIZES}
            for name, shuffle in shuffles.items()
        },
        "first_draws_of_1e9": {
            name: first_elements(shuffle, 10**9) for name, shuffle in shuffles.items()
        },
        "missing_elements": {
            name: {str(size): count_missing(shuffle, size) for size in POWERS}
            for name, shuffle in shuffles.items()
        },
        "cpu_nanoseconds_per_index": nanoseconds(timed),
    }
    (HERE / "shuffle.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, sizes in result["quality"].items():
        for size, figures in sizes.items():
            print(
                f"{name:6} {float(size):7.0e} " + "  ".join(f"{k} {v}" for k, v in figures.items())
            )
    for key in ("first_draws_of_1e9", "missing_elements", "cpu_nanoseconds_per_index"):
        for name, values in result[key].items():
            print(f"{key}  {name}: {values}")


if __name__ == "__main__":
    main()
