"""Estimate of the time that the remaining points of a sweep on this machine need."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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


@dataclass
class _MeasuredSpeed:
    """Sums over points: FLOPs and seconds between logged steps, and seconds to the first one."""

    num_points: int = 0
    flops: float = 0.0
    step_seconds: float = 0.0
    start_seconds: float = 0.0

    def add(self, progress: _PointProgress, step_flops: float) -> None:
        """Add the progress of a point, if it is long enough."""
        first, last = progress.first, progress.last
        if first is None or last is None or last[0] - first[0] < _MIN_STEPS - 1:
            return
        self.num_points += 1
        self.flops += step_flops * (last[0] - first[0])
        self.step_seconds += last[1] - first[1]
        self.start_seconds += first[1] - progress.start_time


class SweepTimeLeft:
    """Estimator of the seconds until all points have ended.

    The time of a step is proportional to its FLOPs, so that points of several sizes can be
    compared. The mean time from the start of a process to its first step is added per point. The
    cost of an estimate is that of the running points, as sums of the others are updated.
    """

    def __init__(self, points: Sequence[SweepPoint]) -> None:
        self._step_flops = {point.run_dir: _compute_step_flops(point) for point in points}
        self._waiting = {
            p.run_dir: self._step_flops[p.run_dir] * compute_total_steps(p.config) for p in points
        }
        self._waiting_flops = math.fsum(self._waiting.values())
        self._largest = [(-flops, str(run_dir)) for run_dir, flops in self._waiting.items()]
        heapq.heapify(self._largest)
        self._running: dict[Path, tuple[int, _PointProgress]] = {}
        self._ended = _MeasuredSpeed()

    def start_point(self, point: SweepPoint, step: int, now: float) -> None:
        """Add a point that starts after the completed `step`."""
        self._stop_waiting(point.run_dir)
        steps_left = compute_total_steps(point.config) - step
        self._running[point.run_dir] = (steps_left, _PointProgress(now, step))

    def update(self, point: SweepPoint, step: int, now: float) -> None:
        """Set the last logged step of a running point."""
        _, progress = self._running[point.run_dir]
        if step > progress.start_step and (progress.last is None or step > progress.last[0]):
            progress.first = progress.first or (step, now)
            progress.last = (step, now)
            steps_left = compute_total_steps(point.config) - step
            self._running[point.run_dir] = (steps_left, progress)

    def end_point(self, point: SweepPoint) -> None:
        """Remove a point that has ended, or that will not start."""
        self._stop_waiting(point.run_dir)
        _, progress = self._running.pop(point.run_dir, (0, None))
        if progress is None:
            return
        if progress.first == progress.last:  # too short to be measured in between
            progress.first = (progress.start_step, progress.start_time)
        self._ended.add(progress, self._step_flops[point.run_dir])

    def estimate(self) -> float | None:
        """Return the seconds until the last point ends; None before there is an estimate."""
        speed = replace(self._ended)
        for run_dir, (_, progress) in self._running.items():
            speed.add(progress, self._step_flops[run_dir])
        if not speed.num_points:
            return None
        per_flop = speed.step_seconds / speed.flops
        start = speed.start_seconds / speed.num_points
        seconds = [
            steps * self._step_flops[run_dir] * per_flop
            for run_dir, (steps, _) in self._running.items()
        ]
        total = sum(seconds) + self._waiting_flops * per_flop + start * len(self._waiting)
        if self._waiting:
            seconds.append(-self._largest[0][0] * per_flop + start)
        return max(max(seconds, default=0.0), total / max(1, len(self._running)))

    def _stop_waiting(self, run_dir: Path) -> None:
        self._waiting_flops -= self._waiting.pop(run_dir, 0.0)
        while self._largest and Path(self._largest[0][1]) not in self._waiting:
            heapq.heappop(self._largest)
        if not self._waiting:
            self._waiting_flops = 0.0  # without the rounding errors of the differences


def _compute_step_flops(point: SweepPoint) -> float:
    batch = point.config.batch
    per_token = compute_flops_per_token(point.config.model, batch.sequence_length)
    return per_token * batch.tokens_per_step
