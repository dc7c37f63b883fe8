"""Signed-rank test of differences of which some are infinite, since a run diverged.

Ranks need no value of a diverged run, only that it is worse than all others. The test is that of
Wilcoxon (1945), exact also with equal ranks. In a study that tests after each seed, the statistic
is the largest over the looks of |z_k| sqrt(k / n), as for the means (`sequential_test`); z_k is the
p value of the first k differences as a normal quantile. The signs of the ranks are random without a
difference, so that the distribution of this statistic depends on n only.
"""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hlat.study.sequential_test import compute_rate_at_least, sample_differences


def compute_signed_rank_p_value(differences: NDArray[np.float64]) -> float:
    """Return the two-sided p value; differences of 0 are omitted, and infinite ones rank last."""
    differences = differences[differences != 0]
    ranks = _compute_doubled_ranks(differences)
    return float(_compute_p_values(ranks)[ranks[differences > 0].sum()])


def compute_sequential_rank_p_value(differences: NDArray[np.float64], num_planned: int) -> float:
    """Return the p value after the first seeds of a study; valid at any look.

    Args:
        differences: Differences of the seeds so far, in the order of the study.
        num_planned: Seeds of the whole study.
    """
    num_planned = max(num_planned, len(differences))
    p_values = [
        compute_signed_rank_p_value(differences[:k]) for k in range(1, len(differences) + 1)
    ]
    observed = max((_weight(np.array(p), k, num_planned) for k, p in enumerate(p_values, 1)))
    return compute_rate_at_least(float(observed), _simulate_null_statistics(num_planned))


def _weight(p_values: NDArray[np.float64], look: int, num_planned: int) -> NDArray[np.float64]:
    """Return p values of a look as weighted normal quantiles."""
    from scipy import special

    quantiles: NDArray[np.float64] = -special.ndtri(p_values / 2)
    return quantiles * math.sqrt(look / num_planned)


def _compute_doubled_ranks(differences: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return twice the ranks of the absolute values; equal values have their mean rank."""
    _, inverse, counts = np.unique(np.abs(differences), return_inverse=True, return_counts=True)
    doubled: NDArray[np.int64] = 2 * counts.cumsum() - counts + 1
    ranks: NDArray[np.int64] = doubled[inverse.reshape(-1)]
    return ranks


def _compute_p_values(doubled_ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the p value of each sum of the positive ranks, if the signs are random."""
    rates = np.ones(1)
    for rank in doubled_ranks:
        rates = (np.pad(rates, (0, rank)) + np.pad(rates, (rank, 0))) / 2
    at_most, at_least = rates.cumsum(), rates[::-1].cumsum()[::-1]
    p_values: NDArray[np.float64] = np.minimum(1.0, 2 * np.minimum(at_most, at_least))
    return p_values


@cache
def _simulate_null_statistics(num_planned: int) -> NDArray[np.float64]:
    """Return sorted statistics of studies without a difference."""
    samples = sample_differences(num_planned, 0)
    largest = np.zeros(len(samples))
    for k in range(1, num_planned + 1):
        ranks = 2 * np.abs(samples[:, :k]).argsort(axis=1).argsort(axis=1) + 2
        sums = np.where(samples[:, :k] > 0, ranks, 0).sum(axis=1)
        p_values = _compute_p_values(2 * np.arange(1, k + 1))[sums]
        largest = np.maximum(largest, _weight(p_values, k, num_planned))
    return np.sort(largest)
