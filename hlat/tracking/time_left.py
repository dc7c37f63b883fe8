"""Estimate of the time that a run still needs, from its logged steps."""

import time
from collections import deque
from statistics import median

_MIN_STEPS = 5
"""Steps of an attempt before the first estimate."""
_NUM_RECENT = 25
"""Logged rows of which the median is taken."""


class TimeLeft:
    """Estimator of the seconds that the remaining steps take, without those of the first row.

    The first row of an attempt contains compilation and allocation. A step is estimated as the
    median of recent rows, plus the measured time between steps, such as evaluations and saves.
    """

    def __init__(self, step: int, total_steps: int) -> None:
        self._start_step, self._last_step, self._total_steps = step, step, total_steps
        self._first_row: tuple[int, float] | None = None
        self._step_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        self._training_seconds = 0.0

    def add_row(self, step: int, step_seconds: float) -> None:
        """Add a logged row; `step_seconds` is the mean over the steps since the last one."""
        if self._first_row is None:
            self._first_row = step, time.monotonic()
        else:
            self._step_seconds.append(step_seconds)
            self._training_seconds += step_seconds * (step - self._last_step)
        self._last_step = step

    def estimate(self) -> float | None:
        """Return the seconds of the remaining steps; None before there is an estimate."""
        if self._first_row is None or not self._step_seconds:
            return None
        first_step, first_time = self._first_row
        if self._last_step < self._start_step + _MIN_STEPS:
            return None
        between = time.monotonic() - first_time - self._training_seconds
        per_step = median(self._step_seconds) + max(0.0, between) / (self._last_step - first_step)
        return per_step * (self._total_steps - self._last_step)
