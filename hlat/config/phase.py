"""The timeline of a run in tokens: which mixture of sources is read when."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class Stage:
    """A stretch of training under one mixture."""

    name: str = MISSING
    """Shown in metrics and reports."""
    tokens: int | None = None
    """Length in tokens; null (the last stage only): to the end of the run."""
    weights: dict[str, float] | None = None
    """Token share per source; null: the weights of the data group."""


@dataclass
class Phase:
    """The stages in order."""

    name: str = MISSING
    """Short name, used in reports."""
    timeline: list[Stage] = MISSING
    """Stages, run one after the other."""
