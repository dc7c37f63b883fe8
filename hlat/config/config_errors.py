"""Configuration errors, and the exit codes that launchers rely on."""

import re
from collections.abc import Iterable
from enum import IntEnum

_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and newline
    "\u200e\u200f\u2028-\u202e\u2066-\u2069"  # separators and changes of the writing direction
    "\ud800-\udfff]"  # surrogates, which cannot be encoded
)


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
    """Loss or gradient norm is too high or not finite, and a rollback did not help, or training
    ended with a higher held-out loss than random weights have. Do not restart."""
    UNHEALTHY_NODE = 4
    """A node failed a check; the message contains its name. Exclude this node and requeue."""
    PREEMPTED = 75
    """A signal interrupted the run, and the state is saved, or no step was trained yet. Requeue, or
    repeat the command: the run resumes."""


class ConfigError(ValueError):
    """An invalid input or file of the user.

    Each problem is one line with the key or file, the conflicting values, and valid values. Control
    characters, for example from a foreign file, are escaped.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(escape_control_characters, problems))
        super().__init__("\n".join(self.problems))


def raise_config_errors(problems: Iterable[str]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if listed := [*problems]:
        raise ConfigError(*listed)


def escape_control_characters(text: str) -> str:
    """Return text for a terminal with control characters escaped, except tab and newline."""
    return _CONTROL_CHARACTERS.sub(lambda match: ascii(match[0])[1:-1], text)


class MissingDeviceError(ConfigError):
    """A process has no device: the layout needs more devices, or a node is faulty."""
