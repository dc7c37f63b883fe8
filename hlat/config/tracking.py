"""What a run shows while it goes, and to whom."""

from dataclasses import dataclass, field
from enum import Enum


class Console(Enum):
    """Styles of progress."""

    auto = "auto"
    """A bar on a terminal, lines elsewhere."""
    bar = "bar"
    """A progress bar."""
    lines = "lines"
    """A line per logged step."""


class Service(Enum):
    """What can show a run besides its own files."""

    wandb = "wandb"
    """Weights & Biases: online when it has a key, else offline, to be synced later."""
    tensorboard = "tensorboard"
    """Event files in the run folder, for `tensorboard --logdir`."""


@dataclass
class Wandb:
    """Where W&B files a run; a null leaves it to W&B's own settings and variables."""

    project: str = "hlat"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project."""
    group: str | None = None
    """Runs with the same group are shown together; the studies in sweeps/ set their names."""
    job_type: str = "train"
    """Kind of the run within its group."""
    tags: list[str] = field(default_factory=list)
    """Words to find the run by."""
    notes: str | None = None
    """What the run is for."""


@dataclass
class Tracking:
    """metrics.jsonl and events.jsonl are always written; this is what is shown besides."""

    console: Console = Console.auto
    """Style of progress on the console."""
    services: list[Service] = field(default_factory=list)
    """Who else hears of the run: `[wandb]`, `[tensorboard]`, or both."""
    wandb: Wandb = field(default_factory=Wandb)
    """Where W&B files the run."""
