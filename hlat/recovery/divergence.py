"""Tells numbers that are wrong from numbers that are merely high."""

import math
from collections import deque

from hlat.engine.interface import Numbers


def finite(numbers: Numbers) -> bool:
    """Whether loss and gradient norm are numbers at all."""
    return math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm or 0.0)


class SpikeWatch:
    """Gradient spikes as the paper defines them (HLAT paper, section IV-A).

    A spike is a gradient norm above the running average of the last `window` steps by more than
    `margin`.
    """

    def __init__(self, window: int, margin: float) -> None:
        self._norms: deque[float] = deque(maxlen=window)
        self._margin = margin

    def is_spike(self, grad_norm: float) -> bool:
        """Judge one more step; while the window fills, nothing is a spike."""
        full = len(self._norms) == self._norms.maxlen
        spike = full and grad_norm > sum(self._norms) / len(self._norms) + self._margin
        self._norms.append(grad_norm)
        return spike
