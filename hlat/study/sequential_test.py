"""Test after each seed, with a controlled probability of a wrong verdict over all looks.

Repeated t-tests at 5% reject too often. The statistic is therefore the largest over the looks so
far of |z_k| sqrt(k / n): z_k is the t statistic of the first k differences as a normal quantile,
and n the planned number of seeds. The weight demands much of early looks, so that the last look has
almost the power of a single test (O'Brien and Fleming 1979). Without a difference, the distribution
of the statistic depends on n only. It is simulated once, with a fixed seed.
"""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hlat.study.power import find_smallest_difference

FIRST_LOOK = 2
"""Seeds of the first test."""
_NUM_SAMPLES = 40_000
_NUM_POWER_SAMPLES = 10_000
_SEED = 20_931
"""Seed of the simulations, so that p values are reproducible."""


def compute_sequential_p_value(differences: NDArray[np.float64], num_planned: int) -> float:
    """Return the p value of no difference after the first seeds of a study; NaN below 2 seeds.

    It is valid at any look: the smallest p value over all looks is below alpha with probability
    alpha without a difference.

    Args:
        differences: Differences of the seeds so far, in the order of the study.
        num_planned: Seeds of the whole study.
    """
    if len(differences) < FIRST_LOOK:
        return math.nan
    num_planned = max(num_planned, len(differences))
    if are_equal(differences):
        return 1.0 if differences[0] == 0 else 0.0
    observed = _compute_statistics(differences[None, :], num_planned)[0]
    return compute_rate_at_least(observed, _simulate_null_statistics(num_planned))


def compute_sequential_power(
    difference: float, std: float, num_seeds: int, alpha: float = 0.05
) -> float:
    """Return the probability that a difference is found at one of the looks."""
    samples = sample_differences(num_seeds, 1)[:_NUM_POWER_SAMPLES] + abs(difference) / std
    null = _simulate_null_statistics(num_seeds)
    critical = null[min(len(null) - 1, math.ceil((1 - alpha) * len(null)))]
    return float((_compute_statistics(samples, num_seeds) > critical).mean())


def compute_sequential_detectable_difference(
    std: float, num_seeds: int, alpha: float = 0.05, power: float = 0.8
) -> float:
    """Return the smallest difference that is found with probability `power`; inf below 2 seeds."""
    if num_seeds < FIRST_LOOK:
        return math.inf
    return std * find_smallest_difference(
        lambda ratio: compute_sequential_power(ratio, 1.0, num_seeds, alpha), power
    )


def compute_rate_at_least(observed: float, null: NDArray[np.float64]) -> float:
    """Return the p value of a statistic: the rate of sorted simulated ones that are as large."""
    limit = observed - 1e-9 * abs(observed)  # statistics of ranks are often equal up to rounding
    num_larger = len(null) - int(np.searchsorted(null, limit))
    return (1 + num_larger) / (1 + len(null))


def sample_differences(num_seeds: int, stream: int) -> NDArray[np.float64]:
    """Return differences of many studies without an effect, shape (studies, seeds)."""
    generator = np.random.default_rng((_SEED, stream))
    return generator.standard_normal((_NUM_SAMPLES, num_seeds))


def are_equal(differences: NDArray[np.float64]) -> bool:
    """Return True if differences are equal up to rounding, so that they have no t statistic."""
    return float(np.ptp(differences)) <= 1e-9 * float(np.abs(differences).max())


def _compute_statistics(differences: NDArray[np.float64], num_planned: int) -> NDArray[np.float64]:
    """Return the largest weighted statistic over the looks of each study, shape (studies,).

    `differences` has the shape (studies, seeds).
    """
    from scipy import special

    counts = np.arange(1, differences.shape[1] + 1)
    means = np.cumsum(differences, axis=1) / counts
    squares = np.cumsum(differences**2, axis=1) - counts * means**2
    largest = np.zeros(len(differences))
    for k in range(FIRST_LOOK, differences.shape[1] + 1):
        variance = np.maximum(squares[:, k - 1], 0) / (k - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.abs(means[:, k - 1]) * math.sqrt(k) / np.sqrt(variance)
        z = -special.ndtri(special.stdtr(k - 1, -np.nan_to_num(t, nan=0.0, posinf=1e300)))
        largest = np.maximum(largest, z * math.sqrt(k / num_planned))
    return largest


@cache
def _simulate_null_statistics(num_planned: int) -> NDArray[np.float64]:
    """Return sorted statistics of studies without a difference."""
    return np.sort(_compute_statistics(sample_differences(num_planned, 0), num_planned))
