"""Configuration errors, and the exit codes that launchers rely on."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every entry point."""

    FINISHED = 0
    FAILED = 1
    """Any failure without a code of its own, such as a final checkpoint that cannot be written."""
    CONFIGURATION = 2
    """Never retry."""
    DIVERGED = 3
    """Do not restart."""
    UNHEALTHY_NODE = 4
    """Exclude this node and requeue."""
    PREEMPTED = 75
    """Interrupted after saving the state: requeue, or start the same command again."""


class ConfigError(ValueError):
    """An invalid input or file of the user.

    Each problem is one line with the key or file, the conflicting values, and valid values.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class MissingDeviceError(ConfigError):
    """A process has no device: the layout needs more devices, or a node is faulty."""
