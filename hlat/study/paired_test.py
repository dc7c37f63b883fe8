"""Comparison of two points of a study, paired by seed.

Runs of one seed have the same initial weights and data order, so their difference varies less than
the runs themselves (common random numbers). A run that diverged has no value of the metric. It
still counts: a test by ranks ranks it below every run that finished. The smaller of the
two p values is doubled (Bonferroni), so that diverged runs never weaken the evidence beyond this.
If the side with the better mean diverged more often, the ranks decide.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hlat.study.rank_test import compute_sequential_rank_p_value, compute_signed_rank_p_value
from hlat.study.sequential_test import are_equal, compute_sequential_p_value


@dataclass(frozen=True)
class PointRuns:
    """Runs of a point by seed: metric of each finished run, and seeds that diverged.

    `influences` are those of the documents of an evaluation set on the metric, where known: the sum
    of the squared differences between two runs is the variance of their difference over documents.
    """

    values: Mapping[str, float]
    diverged: frozenset[str] = field(default_factory=frozenset)
    influences: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def num_ended(self) -> int:
        """Number of runs that finished or diverged."""
        return len(self.values) + len(self.diverged)


@dataclass(frozen=True)
class PairedDifference:
    """Difference of a point to its baseline; numbers without enough pairs are NaN.

    Attributes:
        num_pairs: Seeds with which both runs finished.
        mean: Mean difference over these seeds.
        std: Standard deviation of the differences.
        low: Lower end of the confidence interval of the mean.
        high: Upper end.
        p_value: Two-sided p value of no difference, with diverged runs, before the correction for
            several comparisons.
        effect_size: Mean over standard deviation, corrected for few pairs (Hedges 1981).
        num_diverged: Diverged runs of the point, among seeds that ended with both.
        num_baseline_diverged: Diverged runs of the baseline.
        evaluation_error: Standard error of the mean difference over documents of the evaluation
            set, which interval and p value contain; NaN if unknown.
    """

    num_pairs: int
    mean: float
    std: float
    low: float
    high: float
    p_value: float
    effect_size: float
    num_diverged: int = 0
    num_baseline_diverged: int = 0
    evaluation_error: float = math.nan


def compare_paired(
    point: PointRuns,
    baseline: PointRuns,
    *,
    higher_is_better: bool = False,
    confidence: float = 0.95,
    num_planned: int | None = None,
) -> PairedDifference:
    """Return the difference of a point to its baseline.

    Args:
        point: Runs of the point.
        baseline: Runs of the baseline.
        higher_is_better: Direction of the metric, which ranks diverged runs.
        confidence: Probability that the interval contains the true mean difference.
        num_planned: Number of seeds of a study that tests after each seed, in ascending order;
            None: the study tests once.
    """
    losses = _list_losses(point, baseline, higher_is_better)
    finite = losses[np.isfinite(losses)]
    differences = -finite if higher_is_better else finite
    mean = float(differences.mean()) if len(differences) else math.nan
    std = float(differences.std(ddof=1)) if len(differences) > 1 else math.nan
    evaluation_error = _compute_evaluation_error(point, baseline)
    margin = _compute_margin(std, len(differences), confidence, evaluation_error)
    return PairedDifference(
        num_pairs=len(differences),
        mean=mean,
        std=std,
        low=mean - margin,
        high=mean + margin,
        p_value=_compute_p_value(losses, num_planned, evaluation_error),
        effect_size=_compute_effect_size(mean, std, len(differences)),
        num_diverged=len(point.diverged & (baseline.values.keys() | baseline.diverged)),
        num_baseline_diverged=len(baseline.diverged & (point.values.keys() | point.diverged)),
        evaluation_error=evaluation_error,
    )


def compute_mean_interval(
    values: Sequence[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return the mean, and the ends of its confidence interval; NaN without enough values."""
    if not values:
        return math.nan, math.nan, math.nan
    mean = float(np.mean(values))
    std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    margin = _compute_margin(std, len(values), confidence)
    return mean, mean - margin, mean + margin


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for several comparisons (Holm 1979); NaN stays NaN.

    The probability of at least one wrong rejection is at most the level of the test.
    """
    known = [i for i, value in enumerate(p_values) if not math.isnan(value)]
    adjusted, largest = list(p_values), 0.0
    for rank, i in enumerate(sorted(known, key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(known) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def compute_mcnemar_p_value(num_better: int, num_worse: int) -> float:
    """Return the two-sided exact p value of McNemar's test (1947).

    Args:
        num_better: Pairs in which only the first value is 1.
        num_worse: Pairs in which only the second value is 1.
    """
    from scipy import special

    fewer, total = min(num_better, num_worse), num_better + num_worse
    return min(1.0, 2 * float(special.bdtr(fewer, total, 0.5))) if total else 1.0


def _list_losses(
    point: PointRuns, baseline: PointRuns, higher_is_better: bool
) -> NDArray[np.float64]:
    """Return the differences of all seeds that ended with both, positive if the point is worse.

    They are infinite if one of the two diverged. Seeds that diverged with both are omitted.
    """
    losses = {
        seed: (baseline.values[seed] - value if higher_is_better else value - baseline.values[seed])
        for seed, value in point.values.items()
        if seed in baseline.values
    }
    losses |= dict.fromkeys(point.diverged & baseline.values.keys(), math.inf)
    losses |= dict.fromkeys(baseline.diverged & point.values.keys(), -math.inf)
    return np.array([losses[seed] for seed in sorted(losses, key=_get_seed_order)], np.float64)


def _compute_evaluation_error(point: PointRuns, baseline: PointRuns) -> float:
    """Return the standard error over documents of the mean difference; NaN if unknown."""
    seeds = point.values.keys() & baseline.values.keys()
    if not seeds or not seeds <= point.influences.keys() & baseline.influences.keys():
        return math.nan
    differences = [point.influences[seed] - baseline.influences[seed] for seed in seeds]
    return float(np.linalg.norm(np.mean(differences, axis=0)))


def _compute_p_value(
    losses: NDArray[np.float64], num_planned: int | None, evaluation_error: float
) -> float:
    """Return the p value of differences that are positive if the point is worse.

    That of a study with several tests is not below the p value with the evaluation error.
    """
    finite = losses[np.isfinite(losses)]
    p_value = _compute_t_test_p_value(finite, evaluation_error)
    if num_planned is not None:
        sequential = compute_sequential_p_value(finite, num_planned)
        p_value = max(sequential, p_value if evaluation_error > 0 else 0.0)
    if len(finite) == len(losses):
        return p_value
    if num_planned is None:
        rank_p_value = compute_signed_rank_p_value(losses)
    else:
        rank_p_value = compute_sequential_rank_p_value(losses, num_planned)
    num_more_diverged = (losses == math.inf).sum() - (losses == -math.inf).sum()
    if finite.sum() * num_more_diverged < 0 or math.isnan(p_value):
        return rank_p_value
    return min(1.0, 2 * min(p_value, rank_p_value))


def _compute_t_test_p_value(differences: NDArray[np.float64], evaluation_error: float) -> float:
    from scipy import special  # scipy.stats takes most of a second to import

    if len(differences) < 2:
        return math.nan
    if are_equal(differences) and not evaluation_error > 0:
        return 1.0 if differences[0] == 0 else 0.0
    error = _compute_error(float(differences.std(ddof=1)), len(differences), evaluation_error)
    return float(2 * special.stdtr(len(differences) - 1, -abs(differences.mean()) / error))


def _compute_margin(
    std: float, count: int, confidence: float, evaluation_error: float = math.nan
) -> float:
    from scipy import special

    if count < 2:
        return math.nan
    error = _compute_error(std, count, evaluation_error)
    return float(special.stdtrit(count - 1, (1 + confidence) / 2)) * error


def _compute_error(std: float, count: int, evaluation_error: float) -> float:
    """Return the standard error of a mean over seeds, and over documents if that is known.

    Both contain the interaction of seeds and documents, which makes the sum slightly too large. The
    degrees of freedom are those of the seeds, the fewer.
    """
    from_seeds = std / math.sqrt(count)
    return from_seeds if math.isnan(evaluation_error) else math.hypot(from_seeds, evaluation_error)


def _compute_effect_size(mean: float, std: float, count: int) -> float:
    """Return Hedges' g of paired differences; the correction is that of n - 1 degrees."""
    if count < 3 or std == 0:
        return math.nan
    return mean / std * (1 - 3 / (4 * (count - 1) - 1))


def _get_seed_order(seed: str) -> tuple[int, str]:
    """Return a key that sorts seeds as numbers."""
    return (int(seed), seed) if seed.isdecimal() else (0, seed)
