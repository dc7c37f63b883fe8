"""Learning rate over steps."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING


class Shape(Enum):
    """What follows the linear warm-up (hlat.schedule has the formulas and their sources)."""

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
class Schedule:
    """Warm-up, horizon and floor; the horizon does not change when run.steps stops a run early."""

    name: Shape = MISSING
    """Shape of what follows the warm-up."""
    warmup_steps: int = MISSING
    """Steps of linear warm-up."""
    total_steps: int = MISSING
    """Horizon of the decay, and the run's length unless run.steps or the phase's tokens end it
    sooner."""
    min_lr_ratio: float | None = 0.1
    """Floor as a share of the peak; null where the rate does not decay (constant)."""
    decay_steps: int | None = None
    """Steps of decay before total_steps (wsd); null where the shape does not read it."""
