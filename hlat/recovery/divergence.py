"""Tells numbers that are wrong from numbers that are merely high.

A run whose state is not finite must neither go on nor be saved, because every restart would replay
it; a spike is worth a note, since most last a single step.
"""

import math
from collections import deque
from collections.abc import Iterable

from hlat.config.recovery import Recovery
from hlat.engine.interface import Numbers


def finite(numbers: Numbers) -> bool:
    """Whether loss, gradient norm and parameter norm are all finite."""
    norms = (numbers.grad_norm or 0.0, numbers.param_norm or 0.0)
    return all(map(math.isfinite, (numbers.loss, *norms)))


class SpikeWatch:
    """Gradient spikes as the paper defines them (HLAT paper, section IV-A).

    A spike is a gradient norm above the running average of the last `spike_window` logged ones by
    more than `spike_margin`.

    Args:
        recovery: Window and margin.
        recent: Norms logged before, oldest first: a resumed run judges as if it had not stopped.
    """

    def __init__(self, recovery: Recovery, recent: Iterable[float] = ()) -> None:
        self._norms = deque(recent, maxlen=recovery.spike_window)
        self._margin = recovery.spike_margin

    def is_spike(self, grad_norm: float | None) -> bool:
        """Judge one more step; while the window fills, nothing is a spike."""
        if grad_norm is None or not math.isfinite(grad_norm):
            return False
        full = len(self._norms) == self._norms.maxlen
        spike = full and grad_norm > sum(self._norms) / len(self._norms) + self._margin
        self._norms.append(grad_norm)
        return spike
