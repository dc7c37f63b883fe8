"""Exception for damaged checkpoints.

A single class allows callers to catch damage, and nothing else, and to fall back to an older
checkpoint. As a ConfigError it is reported to the user in one message otherwise.
"""

from hlat.config.config_errors import ConfigError


class CorruptCheckpointError(ConfigError):
    """Checkpoint that is incomplete or differs from what was written."""
