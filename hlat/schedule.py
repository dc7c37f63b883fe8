"""The learning rate of a step.

A pure function of the step, so that a resumed run, a planner's figure and a test see the same rate
without replaying a scheduler's state.
"""

import math

from hlat.config.schedule import Schedule, Shape


def learning_rate(step: int, schedule: Schedule, peak: float) -> float:
    """The rate used in one optimizer step.

    `hlat` is the released scheduler.py (awslabs/HLAT): warm-up by step / warmup_steps, so the very
    first step has rate 0, then half a cosine to zero, clamped at the floor: max(min_lr_ratio, (1 +
    cos(pi p)) / 2) with p the share of the decay that is done. `cosine` warms up by (step + 1) /
    warmup_steps and its half cosine reaches the floor exactly at total_steps. From total_steps on
    both stay at the floor.

    Args:
        step: 0-based index of the step being executed.
        schedule: Shape, warm-up, horizon and floor.
        peak: Rate after warm-up.

    Returns:
        The rate.
    """
    released = schedule.name is Shape.hlat
    if step < schedule.warmup_steps:
        return peak * (step if released else step + 1) / schedule.warmup_steps
    decay_steps = max(1, schedule.total_steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / decay_steps)
    wave = 0.5 * (1 + math.cos(math.pi * done))
    floor = schedule.min_lr_ratio
    return peak * (max(floor, wave) if released else floor + (1 - floor) * wave)
