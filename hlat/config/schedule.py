"""Learning rate over steps."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING


class Shape(Enum):
    """Shapes of decay after a linear warm-up."""

    cosine = "cosine"
    """Half a cosine from the peak to min_lr_ratio at total_steps."""
    hlat = "hlat"
    """Half a cosine from the peak to zero at total_steps, clamped at min_lr_ratio (HLAT's released
    scheduler.py)."""


@dataclass
class Schedule:
    """Warm-up, horizon and floor; the horizon does not change when run.steps stops a run early."""

    name: Shape = MISSING
    """Shape of the decay."""
    warmup_steps: int = MISSING
    """Steps of linear warm-up."""
    total_steps: int = MISSING
    """Horizon of the decay, and the run's length unless run.steps or the phase's tokens end it
    sooner."""
    min_lr_ratio: float = 0.1
    """Floor as a share of the peak."""
