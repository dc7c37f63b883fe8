"""Checkpoint interval, retention and location."""

from dataclasses import dataclass

from hlat.config.bounds import bounded


@dataclass
class CheckpointConfig:
    """Settings of checkpoints, written to `checkpoints/` in the run directory by default.

    A checkpoint is also written when a run ends.
    """

    every_steps: int = bounded(min=1)
    """Steps between checkpoints."""
    keep_last: int = bounded(min=1)
    """Number of newest checkpoints to keep."""
    milestone_tokens: int | None = bounded(None, min=1)
    """Tokens between milestones: permanent copies of the weights alone, in milestones/; null:
    no milestones."""
    asynchronous: bool = True
    """Continue training while a copy of the state in host memory is written; false: needs no memory
    for a copy."""
    keep_every_steps: int | None = bounded(None, min=1)
    """Keep every checkpoint whose step is a multiple of this, in addition to the newest; a multiple
    of every_steps. null: keep the newest only."""
    start_from: str | None = None
    """Checkpoint directory (`.../checkpoints/step_00001000`), run directory with checkpoints, of
    which the newest valid one is used, or URL of either, from which a run without checkpoints
    starts, with optimizer, schedule position and data position; the run's own checkpoints always
    take precedence."""
    destination: str | None = None
    """Directory or fsspec URL, such as s3://bucket/checkpoints, that receives the checkpoints of
    this run in a subdirectory with its name; null: the run directory."""
    signing_key: str | None = None
    """File of an Ed25519 private key (PEM) with which checkpoints are signed; only its path is
    recorded. null: no signature."""
    trusted_keys: str | None = None
    """File of Ed25519 public keys (PEM): the run starts from checkpoints only that are signed with
    one of them. Needs signing_key. null: signatures are not verified."""
