"""The error that says a checkpoint cannot be trusted.

It is one class, so that a caller who falls back to an older checkpoint catches damage and nothing
else; where nobody does, the user is told in one sentence, as of any file that cannot work.
"""

from hlat.config.errors import ConfigError


class CorruptCheckpointError(ConfigError):
    """A checkpoint is incomplete, or differs from what was written."""
