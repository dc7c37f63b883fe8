"""AdamW and gradient clipping."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING


class Algorithm(Enum):
    """Optimizers that exist."""

    adamw = "adamw"
    """Adam with decoupled weight decay."""


@dataclass
class Optimizer:
    """HLAT's AdamW (paper, section III-A)."""

    name: Algorithm = Algorithm.adamw
    """The update rule."""
    lr: float = MISSING
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay, times the learning rate."""
    decay_norms: bool = True
    """Whether the weights of norms decay too, as in HLAT; most others leave them out."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
