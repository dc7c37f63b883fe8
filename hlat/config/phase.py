"""The timeline of a run in tokens: which mixture of sources is read when, and at which rate."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class Stage:
    """A stretch of training under one mixture, at the schedule's learning rate or its own."""

    name: str = MISSING
    """Shown in metrics and reports."""
    tokens: int | None = None
    """Length in tokens; null (the last stage only): to the end of the run."""
    weights: dict[str, float] | None = None
    """Token share per source; null: the weights of the data group."""
    lr: float | None = None
    """Learning rate of this stage in place of the schedule's, constant unless end_lr is set; null:
    the schedule goes on."""
    end_lr: float | None = None
    """Rate that a straight line from lr reaches where the stage ends."""


@dataclass
class Phase:
    """The stages in order."""

    name: str = MISSING
    """Short name, used in reports."""
    timeline: list[Stage] = MISSING
    """Stages, run one after the other."""
