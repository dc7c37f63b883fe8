"""Detection of loss spikes and of divergence from the logged loss and norms.

Most spikes last a single step and only deserve an event. Metrics that stay high or are not finite
mean divergence, and every later checkpoint would contain the diverged state: rollback_policy.py
loads an earlier one.
"""

import math
from collections import deque
from collections.abc import Iterable

from hlat.config.recovery import RecoveryConfig
from hlat.engine.interface import StepMetrics


class SpikeDetector:
    """Comparison of loss and gradient norm with their running averages over the logged steps.

    Averages and margin are those for gradient spikes in the HLAT paper, section IV-A.

    Args:
        recovery: Window, margin, and the number of consecutive bad steps that means divergence.
        recent_metrics: Earlier steps and their metrics, oldest first, so that a resumed run gives
            the same results as an uninterrupted one.

    Attributes:
        is_spike: True if the gradient norm of the last step is a spike.
        average_grad_norm: Running average before the last step; NaN while the window fills.
        first_bad_step: First of the bad steps up to the last one; None if the last one is good.
    """

    def __init__(
        self, recovery: RecoveryConfig, recent_metrics: Iterable[tuple[int, StepMetrics]] = ()
    ) -> None:
        self._loss_average = _RunningAverage(recovery)
        self._grad_norm_average = _RunningAverage(recovery)
        self._max_bad_steps, self._num_bad_steps = recovery.rollback_after, 0
        self.first_bad_step: int | None = None
        self.is_spike, self.average_grad_norm = False, math.nan
        for step, metrics in recent_metrics:
            self.update(step, metrics)

    def update(self, step: int, metrics: StepMetrics) -> bool:
        """Add a logged step; return True if the run has diverged.

        While the window fills, only values that are not finite are bad.
        """
        is_loss_high = self._loss_average.exceeds(metrics.loss)
        self.average_grad_norm = self._grad_norm_average.value
        self.is_spike = self._grad_norm_average.exceeds(metrics.grad_norm)
        if not (is_loss_high or self.is_spike) and is_finite(metrics):
            self.first_bad_step, self._num_bad_steps = None, 0
            return False
        self.first_bad_step = self.first_bad_step or step
        self._num_bad_steps += 1
        has_finite_weights = math.isfinite(metrics.param_norm or 0.0)
        return not has_finite_weights or self._num_bad_steps >= self._max_bad_steps


class _RunningAverage:
    """Running average of the finite values of one metric."""

    def __init__(self, recovery: RecoveryConfig) -> None:
        self._values: deque[float] = deque(maxlen=recovery.spike_window)
        self._margin = recovery.spike_margin

    @property
    def value(self) -> float:
        """Average; NaN while the window fills."""
        is_full = len(self._values) == self._values.maxlen
        return sum(self._values) / len(self._values) if is_full else math.nan

    def exceeds(self, value: float | None) -> bool:
        """Return True if `value` is above the average by the margin, then add it."""
        if value is None or not math.isfinite(value):
            return False
        is_high = value > self.value + self._margin
        self._values.append(value)
        return is_high


def is_finite(metrics: StepMetrics) -> bool:
    """Return True if loss, gradient norm and parameter norm are all finite."""
    norms = (metrics.grad_norm or 0.0, metrics.param_norm or 0.0)
    return all(map(math.isfinite, (metrics.loss, *norms)))
