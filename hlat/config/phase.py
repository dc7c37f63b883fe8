"""Timeline of a run in tokens: data mixture and learning rate of each stage."""

from dataclasses import dataclass

from omegaconf import MISSING

from hlat.config.bounds import bounded


@dataclass
class PhaseStage:
    """A part of the training with one mixture, and optionally a separate learning rate."""

    name: str = MISSING
    """Name in metrics and reports."""
    tokens: int | None = None
    """Length in tokens; null (the last stage only): to the end of the run."""
    weights: dict[str, float] | None = bounded(  # noqa: RUF009 (a field)
        None, min=0, below=float("inf")
    )
    """Token fraction per source; null: the weights of the data group."""
    lr: float | None = bounded(None, min=0, below=float("inf"))
    """Learning rate of this stage instead of the schedule's, constant unless end_lr is set; null:
    the schedule continues."""
    end_lr: float | None = bounded(None, min=0, below=float("inf"))
    """Learning rate at the end of the stage, interpolated linearly from lr."""


@dataclass
class PhaseConfig:
    """The stages in order."""

    name: str = MISSING
    """Short name, used in reports."""
    timeline: list[PhaseStage] = MISSING
    """Consecutive stages."""
