"""Power of the paired t-test, and noise of single checkpoints: what a number of seeds can detect.

The statistic of n differences with mean d and standard deviation s has a noncentral t distribution
with n - 1 degrees of freedom and noncentrality d sqrt(n) / s.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import variance

import numpy as np

MAX_SEEDS = 1000
"""Largest number of seeds that `compute_required_seeds` returns."""
NUM_LAST = 6
"""Last evaluations that the noise of a checkpoint is estimated from, if they are in the second half
of the run."""
_MIN_NOISE_VALUES = 3


def compute_power(difference: float, std: float, num_seeds: int, alpha: float = 0.05) -> float:
    """Return the probability that a two-sided paired t-test finds a difference.

    Args:
        difference: True mean difference.
        std: Standard deviation of the differences over seeds.
        num_seeds: Number of pairs, at least 2.
        alpha: Level of the test.
    """
    from scipy import special

    if std == 0:
        return float(difference != 0)
    degrees = num_seeds - 1
    critical = float(special.stdtrit(degrees, 1 - alpha / 2))
    shift = abs(difference) * math.sqrt(num_seeds) / std
    # Where the distribution function is almost 0, some versions of SciPy return NaN
    low, high = np.nan_to_num(special.nctdtr(degrees, shift, [-critical, critical]))
    return float(np.clip(1 - high + low, 0.0, 1.0))


def compute_detectable_difference(
    std: float, num_seeds: int, alpha: float = 0.05, power: float = 0.8
) -> float:
    """Return the smallest difference that is found with probability `power`; inf below 2 seeds."""
    if num_seeds < 2:
        return math.inf
    return std * find_smallest_difference(
        lambda ratio: compute_power(ratio, 1.0, num_seeds, alpha), power
    )


def compute_required_seeds(
    difference: float,
    std: float,
    alpha: float = 0.05,
    power: float = 0.8,
    evaluation_error: float = 0.0,
) -> int | None:
    """Return the smallest number of seeds that finds a difference with probability `power`.

    None: more than `MAX_SEEDS`. More seeds do not reduce `evaluation_error`, the standard error of
    the difference over documents.
    """

    def compute(num_seeds: int) -> float:
        total = math.hypot(std, evaluation_error * math.sqrt(num_seeds))
        return compute_power(difference, total, num_seeds, alpha)

    if difference == 0 or compute(MAX_SEEDS) < power:
        return None
    low, high = 1, MAX_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        enough = compute(middle) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high


def estimate_difference_std(points: Iterable[Mapping[str, float]]) -> tuple[float, int]:
    """Return the standard deviation over seeds of the difference between two points.

    The variances of all pairs of points with common seeds are pooled.

    Args:
        points: Metric by seed of each point.

    Returns:
        The standard deviation, NaN if no two points have two common seeds, and the number of runs
        that it is from.
    """
    squares, degrees, used = 0.0, 0, set[tuple[int, str]]()
    for (i, one), (j, other) in combinations(enumerate(points), 2):
        seeds = one.keys() & other.keys()
        if len(seeds) > 1:
            squares += variance([one[s] - other[s] for s in seeds]) * (len(seeds) - 1)
            degrees += len(seeds) - 1
            used |= {(index, seed) for index in (i, j) for seed in seeds}
    return (math.sqrt(squares / degrees) if degrees else math.nan), len(used)


def find_smallest_difference(compute: Callable[[float], float], power: float) -> float:
    """Return the smallest difference at which the increasing function `compute` reaches `power`."""
    high = 1.0
    while compute(high) < power:
        high *= 2
    low = 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if compute(middle) >= power else (middle, high)
    return high


def estimate_checkpoint_noise(values: Sequence[float]) -> float:
    """Return the standard deviation of the last values around their local trend; NaN below 3.

    Seeds that reach the same loss on average still differ in a single checkpoint. A difference
    between points below this noise is not visible in one run (Signal and Noise, arXiv 2508.13144).
    Each value is compared with the mean of its neighbours, which removes a smooth decrease of the
    loss (Gasser, Sroka and Jennen-Steinmetz 1986, equation 2.1 at equal distances).

    Args:
        values: Metric at equally spaced evaluations of a run, in order.
    """
    num_last = min(NUM_LAST, max(_MIN_NOISE_VALUES, (len(values) + 1) // 2))
    last = np.asarray(values, np.float64)[-num_last:]
    if len(last) < _MIN_NOISE_VALUES:
        return math.nan
    residuals = last[1:-1] - (last[:-2] + last[2:]) / 2
    return float(np.sqrt((residuals**2).mean() * 2 / 3))


def pool_noise(noises: Sequence[float]) -> float:
    """Return the root mean square of the noises of several runs; NaN without any."""
    known = [noise for noise in noises if not math.isnan(noise)]
    return math.sqrt(sum(noise**2 for noise in known) / len(known)) if known else math.nan
