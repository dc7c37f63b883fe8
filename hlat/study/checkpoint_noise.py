"""Noise of a metric over the last checkpoints of a run.

Seeds that reach the same loss on average still differ in a single checkpoint. A difference between
points below this noise is not visible in one run (Signal and Noise, arXiv 2508.13144).
"""

import math
from collections.abc import Sequence

import numpy as np

NUM_LAST = 6
"""Last evaluations that the noise is estimated from, if they are in the second half of the run."""
_MIN_VALUES = 3


def estimate_checkpoint_noise(values: Sequence[float]) -> float:
    """Return the standard deviation of the last values around their local trend; NaN below 3.

    Each value is compared with the mean of its neighbours, which removes a smooth decrease of the
    loss (Gasser, Sroka and Jennen-Steinmetz 1986, equation 2.1 at equal distances).

    Args:
        values: Metric at equally spaced evaluations of a run, in order.
    """
    num_last = min(NUM_LAST, max(_MIN_VALUES, (len(values) + 1) // 2))
    last = np.asarray(values, np.float64)[-num_last:]
    if len(last) < _MIN_VALUES:
        return math.nan
    residuals = last[1:-1] - (last[:-2] + last[2:]) / 2
    return float(np.sqrt((residuals**2).mean() * 2 / 3))


def pool_noise(noises: Sequence[float]) -> float:
    """Return the root mean square of the noises of several runs; NaN without any."""
    known = [noise for noise in noises if not math.isnan(noise)]
    return math.sqrt(sum(noise**2 for noise in known) / len(known)) if known else math.nan
