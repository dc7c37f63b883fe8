"""Tells numbers that are wrong from numbers that are merely high, and says when enough is enough.

Most spikes last a single step and are worth a note. Numbers that stay high or are not finite mean
that the run has lost its way, and every later checkpoint would keep it.
"""

import enum
import math
from collections import deque
from collections.abc import Iterable

from hlat.config.recovery import Recovery
from hlat.engine.interface import Numbers


class Verdict(enum.Enum):
    """What becomes of a run after a logged step."""

    GO_ON = enum.auto()
    ROLL_BACK = enum.auto()


class Watch:
    """Judges loss and gradient norm by their running averages over the last logged steps.

    Both averages and their margin are the paper's for gradient spikes (HLAT paper, section IV-A).

    Args:
        recovery: Window, margin, and how long a row of bad steps may be.
        recent: Steps logged before with their numbers, oldest first: a resumed run judges as if it
            had not stopped.

    Attributes:
        spiked: Whether the gradient norm of the last step was a spike.
        first_bad: The first of the bad steps in a row that the last one ended; None if it was good.
    """

    def __init__(self, recovery: Recovery, recent: Iterable[tuple[int, Numbers]] = ()) -> None:
        self._losses = _Average(recovery)
        self._norms = _Average(recovery)
        self._longest, self._length = recovery.rollback_after, 0
        self.first_bad: int | None = None
        self.spiked = False
        for step, numbers in recent:
            self.judge(step, numbers)

    def judge(self, step: int, numbers: Numbers) -> Verdict:
        """Judge one more step; while the window fills, nothing finite is too high."""
        high_loss = self._losses.exceeds(numbers.loss)
        self.spiked = self._norms.exceeds(numbers.grad_norm)
        if not (high_loss or self.spiked) and finite(numbers):
            self.first_bad, self._length = None, 0
            return Verdict.GO_ON
        self.first_bad = self.first_bad or step
        self._length += 1
        broken = not math.isfinite(numbers.param_norm or 0.0)
        return Verdict.ROLL_BACK if broken or self._length >= self._longest else Verdict.GO_ON


class _Average:
    """The running average of a number, of what was finite."""

    def __init__(self, recovery: Recovery) -> None:
        self._values: deque[float] = deque(maxlen=recovery.spike_window)
        self._margin = recovery.spike_margin

    def exceeds(self, value: float | None) -> bool:
        """Whether a value is above the average by the margin; it counts from now on."""
        if value is None or not math.isfinite(value):
            return False
        full = len(self._values) == self._values.maxlen
        high = full and value > sum(self._values) / len(self._values) + self._margin
        self._values.append(value)
        return high


def finite(numbers: Numbers) -> bool:
    """Whether loss, gradient norm and parameter norm are all finite."""
    norms = (numbers.grad_norm or 0.0, numbers.param_norm or 0.0)
    return all(map(math.isfinite, (numbers.loss, *norms)))
