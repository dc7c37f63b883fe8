"""How often the state of a run is saved and how many saves are kept."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class Checkpoint:
    """Saves go to `checkpoints/` in the run folder, or elsewhere; a run's end is saved too."""

    every_steps: int = MISSING
    """Steps between saves."""
    keep_last: int = MISSING
    """Newest checkpoints that are kept."""
    milestone_tokens: int | None = None
    """Tokens between milestones, which are kept for ever: weights alone, in milestones/; null:
    none."""
    asynchronous: bool = True
    """Whether training goes on while a copy of the state, in host memory, is written; false: no
    memory for a copy."""
    keep_every_steps: int | None = None
    """Checkpoints whose step is a multiple of this are kept for ever, beside the newest; a multiple
    of every_steps. null: none are."""
    start_from: str | None = None
    """A checkpoint folder (`.../checkpoints/step_00001000`), or its URL, that a run without one of
    its own begins from, with its optimizer, schedule position and data position; the run's own
    checkpoints always come first."""
    destination: str | None = None
    """Folder or fsspec URL, such as s3://bucket/checkpoints, in which this run's checkpoints lie,
    under its name; null: its own folder."""
