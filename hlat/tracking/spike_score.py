"""Frequency of spikes in a metric, independent of its scale."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WINDOW, _MIN_WINDOW = 1000, 32
"""Maximum and minimum number of earlier logged steps that a value is compared with."""
_NUM_DEVIATIONS = 7.0


def compute_spike_score(values: Sequence[float]) -> float | None:
    """Return the share of values at least 7 standard deviations above the mean of earlier ones.

    The earlier values are those of up to 1,000 logged steps, at least 32 (OLMo 2, arXiv 2501.00656;
    it counts values below the mean too). None: there are too few.

    Args:
        values: Finite values in the order of the steps.
    """
    import numpy as np  # the names of the metrics are a part of --help

    centered = np.array(values, np.float64)
    if len(centered) <= _MIN_WINDOW:
        return None
    centered -= centered.mean()  # so that the variances are exact
    ends = np.arange(_MIN_WINDOW, len(centered))
    starts = np.maximum(0, ends - _WINDOW)
    means, squares = (
        (total[ends] - total[starts]) / (ends - starts)
        for total in (_accumulate(centered), _accumulate(centered**2))
    )
    deviations = np.sqrt(np.maximum(squares - means**2, 0))
    return float((centered[ends] - means > _NUM_DEVIATIONS * deviations).mean())


def _accumulate(values: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Return the sums of the first n values, for n from 0 to their number."""
    import numpy as np

    return np.concatenate([[0.0], np.cumsum(values)])
