"""Console output and tracking services."""

from dataclasses import dataclass, field
from enum import Enum

from hlat.config.bounds import bounded


class ConsoleStyle(Enum):
    """Styles of progress output."""

    auto = "auto"
    """A bar on a terminal, lines elsewhere."""
    bar = "bar"
    """A progress bar."""
    lines = "lines"
    """A line per logged step."""


class TrackingService(Enum):
    """Services that display a run in addition to its files."""

    wandb = "wandb"
    """Weights & Biases: online with an API key, else offline for a later sync."""
    tensorboard = "tensorboard"
    """Event files in the run directory, for `tensorboard --logdir`."""


class CheckpointArtifact(Enum):
    """Content of the W&B artifact of a checkpoint."""

    reference = "reference"
    """The path of the checkpoint; its files are not uploaded."""
    upload = "upload"
    """The files of the checkpoint, weights and optimizer state."""


@dataclass
class WandbConfig:
    """Arguments of wandb.init; null: the settings and environment variables of W&B apply."""

    project: str = "hlat"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project."""
    group: str | None = None
    """Group of runs that are displayed together; the studies in sweeps/ set their names."""
    job_type: str = "train"
    """Type of the run within its group."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    notes: str | None = None
    """Description of the run."""
    checkpoints: CheckpointArtifact | None = None
    """Log each checkpoint as a version of a model artifact, as `reference` or `upload`; null: do
    not."""


@dataclass
class TrackingConfig:
    """Outputs in addition to metrics.jsonl and events.jsonl, which are always written."""

    console: ConsoleStyle = ConsoleStyle.auto
    """Style of progress on the console."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of extensions to compute and log (docs/guides/own-idea.md)."""
    metrics_every: int = bounded(10, min=1)
    """Steps between computations of `metrics`, each a forward pass of a micro batch, and of
    `diagnostics`; a multiple of run.log_every."""
    diagnostics: bool = False
    """Log quantities that show an instability: largest logits of attention and output, size of the
    update, weights that it leaves unchanged, and the ratio of gradients to their second moment
    (docs/tracking.md). They need a forward pass of one sequence and a copy of the weights."""
    report: bool | None = None
    """Write report.html and figures/ at the end of a run; null: true, but false for a point of a
    sweep on this machine, which ends with a comparison. `hlat report RUN` writes them too."""
    services: list[TrackingService] = field(default_factory=list)
    """Tracking services: `[wandb]`, `[tensorboard]`, or both."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Settings of the W&B run."""
