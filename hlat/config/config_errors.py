"""Configuration errors, and the exit codes that launchers rely on."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every entry point."""

    FINISHED = 0
    """The last step is complete and saved, or the command succeeded. Nothing to do."""
    FAILED = 1
    """A failure without a code of its own, such as a final checkpoint that cannot be written. Read
    the message, then repeat the command."""
    CONFIGURATION = 2
    """A setting, or a file that it names, is invalid; every problem is printed. Correct it; never
    retry."""
    DIVERGED = 3
    """Loss or gradient norm is too high or not finite, and a rollback did not help. Do not
    restart."""
    UNHEALTHY_NODE = 4
    """A node failed a check; the message contains its name. Exclude this node and requeue."""
    PREEMPTED = 75
    """A signal interrupted the run, and the state is saved. Requeue, or repeat the command: the run
    resumes."""


class ConfigError(ValueError):
    """An invalid input or file of the user.

    Each problem is one line with the key or file, the conflicting values, and valid values.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class MissingDeviceError(ConfigError):
    """A process has no device: the layout needs more devices, or a node is faulty."""
