"""Estimate of the time that the remaining points of a sweep on this machine need."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hlat.config.run_steps import compute_total_steps
from hlat.model.decoder_spec import compute_flops_per_token

from .._sweep_points import SweepPoint

_MIN_STEPS = 5
"""Steps of a running point before the first estimate."""


@dataclass
class _PointProgress:
    """Progress of a started point; its speed is measured from its first logged step on."""

    start_time: float
    start_step: int
    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None


class SweepTimeLeft:
    """Estimator of the seconds until all points have ended.

    The time of a step is proportional to its FLOPs, so that points of several sizes can be
    compared. The mean time from the start of a process to its first step is added per point.
    """

    def __init__(self, points: Sequence[SweepPoint]) -> None:
        self._flops = {point.run_dir: _compute_step_flops(point) for point in points}
        self._steps_left = {p.run_dir: compute_total_steps(p.config) for p in points}
        self._progress: dict[object, _PointProgress] = {}

    def start_point(self, point: SweepPoint, step: int, now: float) -> None:
        """Add a point that starts after the completed `step`."""
        self._progress[point.run_dir] = _PointProgress(now, step)
        self._steps_left[point.run_dir] = compute_total_steps(point.config) - step

    def update(self, point: SweepPoint, step: int, now: float) -> None:
        """Set the last logged step of a running point."""
        progress = self._progress[point.run_dir]
        if step > progress.start_step and (progress.last is None or step > progress.last[0]):
            progress.first = progress.first or (step, now)
            progress.last = (step, now)
            self._steps_left[point.run_dir] = compute_total_steps(point.config) - step

    def end_point(self, point: SweepPoint) -> None:
        """Remove a point that has ended, or that will not start."""
        del self._steps_left[point.run_dir]
        progress = self._progress.get(point.run_dir)
        if progress and progress.first == progress.last:  # too short to be measured in between
            progress.first = (progress.start_step, progress.start_time)

    def estimate(self) -> float | None:
        """Return the seconds until the last point ends; None before there is an estimate."""
        measured = [
            (run_dir, one.first, one.last)
            for run_dir, one in self._progress.items()
            if one.first and one.last and one.last[0] - one.first[0] >= _MIN_STEPS - 1
        ]
        if not measured:
            return None
        flops = sum(self._flops[key] * (last[0] - first[0]) for key, first, last in measured)
        per_flop = sum(last[1] - first[1] for _, first, last in measured) / flops
        starts = [first[1] - self._progress[run_dir].start_time for run_dir, first, _ in measured]
        seconds = {
            run_dir: steps * self._flops[run_dir] * per_flop
            + (0.0 if run_dir in self._progress else fmean(starts))
            for run_dir, steps in self._steps_left.items()
        }
        num_running = sum(run_dir in self._progress for run_dir in seconds)
        longest = max(seconds.values(), default=0.0)
        return max(longest, sum(seconds.values()) / max(1, num_running))


def _compute_step_flops(point: SweepPoint) -> float:
    batch = point.config.batch
    per_token = compute_flops_per_token(point.config.model, batch.sequence_length)
    return per_token * batch.tokens_per_step
