"""How often the state of a run is saved and how many saves are kept."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class Checkpoint:
    """Saves go to `checkpoints/` in the run folder; the end of a run is always saved."""

    every_steps: int = MISSING
    """Steps between saves."""
    keep_last: int = MISSING
    """Newest checkpoints that are kept."""
