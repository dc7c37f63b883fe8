"""Schedule: warm-up, stable, then the inverse of the square root of the step (arXiv 2106.04560).

hlat train extensions=[examples/warmup_stable_invsqrt.py] schedule.name=invsqrt
"""

import math
from dataclasses import dataclass

from hlat.config.bounds import bounded
from hlat.config.components import register_component
from hlat.config.schedule import ScheduleConfig, ScheduleSpec


@dataclass
class InvSqrtConfig:
    """Stable part of the schedule."""

    stable_steps: int = bounded(100, min=1)
    """Steps from the start of the run with the peak learning rate, with those of the warm-up."""


def compute_factor(step: int, schedule: ScheduleConfig) -> float:
    """Return 1 for the first steps, then sqrt(stable_steps / step), at least min_lr_ratio."""
    stable_steps = max(schedule.invsqrt.stable_steps, schedule.warmup_steps)
    factor = 1.0 if step <= stable_steps else math.sqrt(stable_steps / step)
    return max(schedule.min_lr_ratio, factor)


register_component(
    "schedule",
    "invsqrt",
    "The peak for stable_steps, then the inverse of the square root of the step.",
    ScheduleSpec(),
    settings=InvSqrtConfig,
    implementation=compute_factor,
)
