"""Range of a vertical axis that outliers do not determine.

The range contains the values between two quantiles and, on both sides, a margin that is a multiple
of their distance. The script of the page computes the same range of the visible values
(`robustRange` in interactive_figures.js).
"""

import numpy as np
from numpy.typing import NDArray

_MIN_VALUES, _QUANTILE, _REACH, _MIN_GAIN = 20, 0.05, 1.5, 1.5


def compute_robust_range(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the range of finite values without outliers; None if the whole range is suitable."""
    if len(values) < _MIN_VALUES:
        return None
    low, high = np.quantile(values, [_QUANTILE, 1 - _QUANTILE]).tolist()
    smallest, largest = float(values.min()), float(values.max())
    reach = _REACH * (high - low)
    bottom, top = max(smallest, low - reach), min(largest, high + reach)
    is_useful = reach > 0 and largest - smallest > _MIN_GAIN * (top - bottom)
    return (bottom, top) if is_useful else None
