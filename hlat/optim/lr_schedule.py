"""Learning rate as a pure function of the step.

Resumed runs, the planner and tests compute the same rate without the state of a torch
lr_scheduler.
"""

import math

from hlat.config.batch_steps import compute_schedule_step
from hlat.config.components import get_implementation, get_spec, set_implementation
from hlat.config.phase_steps import find_stage, find_stage_span
from hlat.config.run import Config
from hlat.config.schedule import ScheduleConfig, ScheduleSpec


def compute_lr(step: int, config: Config) -> float:
    """Return the learning rate of one optimizer step, 0-based from the start of the run.

    A stage of the phase with an `lr` overrides the schedule: the rate is constant, or linear from
    `lr` to `end_lr`, which the first step after the stage would reach. An open stage ends at
    schedule.total_steps. A stage without `lr` has the schedule's rate of the step, independent of
    the stages before it. With batch.ramp, the rate is that of a run without ramp after the same
    tokens.
    """
    batch = config.batch
    schedule_step = compute_schedule_step(step, batch)
    stage = find_stage(schedule_step, config.phase, batch)
    if stage.lr is None:
        return compute_schedule_lr(schedule_step, config.schedule, config.optimizer.lr)
    if stage.end_lr is None:
        return stage.lr
    start, end = find_stage_span(schedule_step, config.phase, batch)
    end = config.schedule.total_steps if end is None else end
    progress = _compute_progress(schedule_step, start, end)
    return stage.lr + (stage.end_lr - stage.lr) * progress


def compute_schedule_lr(step: float, schedule: ScheduleConfig, peak_lr: float) -> float:
    """Return the rate of a schedule: linear warm-up, then its shape, then the floor.

    Warm-up is (step + 1) / warmup_steps, so that no step has rate 0. Shape `hlat` uses
    step / warmup_steps as in the released scheduler.py (awslabs/HLAT): its first step has rate 0.
    `step` counts full batches before the step, which are not whole within batch.ramp.
    """
    if step < schedule.warmup_steps:
        spec: ScheduleSpec = get_spec("schedule", schedule.name)
        numerator = step if spec.warmup_starts_at_zero else step + 1
        return peak_lr * numerator / schedule.warmup_steps
    factor: float = get_implementation("schedule", schedule.name)(step, schedule)
    return peak_lr * factor


def constant(step: float, schedule: ScheduleConfig) -> float:
    """Return 1, for a trunk from which decays of any length branch off (arXiv 2405.18392)."""
    return 1.0


def cosine(step: float, schedule: ScheduleConfig) -> float:
    """Return half a cosine that reaches the floor at total_steps (arXiv 1608.03983, eq. 5)."""
    return _apply_floor(_compute_half_cosine(step, schedule), schedule)


def hlat_cosine(step: float, schedule: ScheduleConfig) -> float:
    """Return half a cosine to zero, clamped: max(min_lr_ratio, (1 + cos(pi p)) / 2).

    p is the progress of the decay. This is the released scheduler.py (awslabs/HLAT): it reaches a
    floor of a tenth at step 397,994 of 500,000, before the horizon.
    """
    return max(_get_min_lr_ratio(schedule), _compute_half_cosine(step, schedule))


def inverse_sqrt(step: float, schedule: ScheduleConfig) -> float:
    """Return sqrt(w / s), at least the floor (arXiv 1706.03762, equation 3).

    s is the step counted from 1, and w the steps of the warm-up, at least 1.
    """
    return max(_get_min_lr_ratio(schedule), math.sqrt(max(1, schedule.warmup_steps) / (step + 1)))


def power(step: float, schedule: ScheduleConfig) -> float:
    """Return (s / s_0)^b, at most 1, and a line to the floor over the last decay_steps.

    s is the step counted from 1, s_0 schedule.power.start_step and b the exponent (Power scheduler,
    arXiv 2408.13359, equation 5 at a constant batch; the paper decays exponentially).
    """
    assert schedule.decay_steps is not None, "validation requires decay_steps for power"
    settings = schedule.power
    factor: float = min(1.0, ((step + 1) / settings.start_step) ** settings.exponent)
    start = schedule.total_steps - schedule.decay_steps
    progress = _compute_progress(step, start, schedule.total_steps)
    return factor * _apply_floor(1 - progress, schedule)


def linear(step: float, schedule: ScheduleConfig) -> float:
    """Return a line that reaches the floor at total_steps (to zero: D2Z, arXiv 2502.15938)."""
    progress = _compute_progress(step, schedule.warmup_steps, schedule.total_steps)
    return _apply_floor(1 - progress, schedule)


def wsd(step: float, schedule: ScheduleConfig) -> float:
    """Return 1 until decay_steps before the horizon, then 1 - sqrt(p) to the floor.

    p is the progress of the decay. Warm-up, stable, decay is MiniCPM's (arXiv 2404.06395,
    section 4), which decays exponentially over the last tenth. 1 - sqrt is the form that arXiv
    2405.18392 finds consistently better than a line, there over the last fifth, to zero.
    """
    assert schedule.decay_steps is not None, "validation requires decay_steps for wsd"
    start = schedule.total_steps - schedule.decay_steps
    progress = _compute_progress(step, start, schedule.total_steps)
    return _apply_floor(1 - math.sqrt(progress), schedule)


def _compute_half_cosine(step: float, schedule: ScheduleConfig) -> float:
    progress = _compute_progress(step, schedule.warmup_steps, schedule.total_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _compute_progress(step: float, start: int, end: int) -> float:
    """Return the fraction of the steps from `start` to `end` that precede `step`."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def _apply_floor(factor: float, schedule: ScheduleConfig) -> float:
    floor = _get_min_lr_ratio(schedule)
    return floor + (1 - floor) * factor


def _get_min_lr_ratio(schedule: ScheduleConfig) -> float:
    assert schedule.min_lr_ratio is not None, "validation requires min_lr_ratio for a decay"
    return schedule.min_lr_ratio


set_implementation("schedule", "constant", constant)
set_implementation("schedule", "cosine", cosine)
set_implementation("schedule", "hlat", hlat_cosine)
set_implementation("schedule", "inverse_sqrt", inverse_sqrt)
set_implementation("schedule", "linear", linear)
set_implementation("schedule", "power", power)
set_implementation("schedule", "wsd", wsd)
