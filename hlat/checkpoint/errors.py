"""The error that says a checkpoint cannot be trusted.

It is one class, so that a caller who falls back to an older checkpoint catches damage and nothing
else.
"""


class CorruptCheckpointError(ValueError):
    """A checkpoint is incomplete, or differs from what was written."""
