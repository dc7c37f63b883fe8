"""The error that a user can mend, and the exit codes that launchers read."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every entry; the contract with launchers."""

    FINISHED = 0
    FAILED = 1
    """Anything without a code of its own, such as a last state that no disk would take."""
    CONFIGURATION = 2
    """Never retry."""
    DIVERGED = 3
    """Do not replay."""
    UNHEALTHY_NODE = 4
    """Exclude this node, requeue."""
    PREEMPTED = 75
    """Interrupted with the state saved: requeue, or start the same command again."""


class ConfigError(ValueError):
    """Something the user typed, or a file the user named, cannot work.

    Each problem is one line that names the key or file, what disagrees, and what would work.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class MissingDeviceError(ConfigError):
    """A process finds no device of its own: the layout asks for too many, or a node is broken."""
