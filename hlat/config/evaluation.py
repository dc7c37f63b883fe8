"""When the model is measured on held-out text."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class Evaluation:
    """Held-out loss and bits per byte; always measured before the first step and after the last."""

    every_steps: int | None = None
    """Steps between evaluations within a run; null: only at its start and end."""
    sequences_per_source: int = MISSING
    """Held-out sequences of each source."""
