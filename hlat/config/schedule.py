"""Learning-rate schedule."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from hlat.config.bounds import bounded


class ScheduleShape(Enum):
    """Shape after the linear warm-up (formulas and sources: hlat.optim.lr_schedule)."""

    constant = "constant"
    """The peak."""
    cosine = "cosine"
    """Half a cosine from the peak to min_lr_ratio at total_steps."""
    hlat = "hlat"
    """Half a cosine from the peak to zero at total_steps, clamped at min_lr_ratio (HLAT's released
    scheduler.py)."""
    linear = "linear"
    """A straight line from the peak to min_lr_ratio at total_steps."""
    wsd = "wsd"
    """Warm-up, stable, decay: the peak, then one minus a square root to min_lr_ratio over the last
    decay_steps."""


@dataclass
class ScheduleConfig:
    """Warm-up, decay and minimum learning rate; independent of run.steps."""

    name: ScheduleShape = MISSING
    """Shape after the warm-up."""
    warmup_steps: int = bounded(min=0)
    """Steps of linear warm-up."""
    total_steps: int = bounded(min=1)
    """Last step of the decay, and the length of the run unless run.steps or the tokens of the phase
    end it earlier."""
    min_lr_ratio: float | None = bounded(0.1, min=0, max=1)
    """Minimum learning rate as a fraction of the peak; null for shapes without decay (constant)."""
    decay_steps: int | None = bounded(None, min=1)
    """Steps of decay before total_steps (wsd); null for the other shapes."""
