"""Commands of hlat besides training as jobs of a launcher: evaluations, averages and reports."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.config.run import Config

COMMANDS_DIR = "jobs"
"""Directory of the submissions of averages and reports, in the directory of a run or campaign."""
COMMAND_VERBS = {"evaluate": "evaluates", "average": "averages", "report": "reports on"}
"""Verb of each command for messages."""


@dataclass(frozen=True)
class CommandJob:
    """A command as a job of a launcher."""

    command: str
    """Name of the command, a key of `COMMAND_VERBS`."""
    name: str
    """Deterministic name of the command with its arguments."""
    subject: str
    """Model, run or campaign as given on the command line."""
    job_dir: Path
    """Directory of the submissions, as the run directory of a run."""
    arguments: tuple[str, ...]
    """Arguments of the command."""
    config: Config
    """Configuration that determines nodes and environment variables."""
    scores_dir: Path | None = None
    """Directory of the scores of an evaluation; None for other commands."""
    step: int | None = None
    """Checkpoint of a run that an evaluation reads; None: no particular one."""

    @property
    def job_name(self) -> str:
        """Job name for the scheduler."""
        return f"{Path(self.subject).name}.{self.name}"

    @property
    def verb(self) -> str:
        """Verb for messages."""
        return COMMAND_VERBS[self.command]


def build_job_dir(base_dir: Path, command: str, arguments: Sequence[str]) -> Path:
    """Return the directory of the submissions of a command with its arguments."""
    digest = hashlib.sha256(repr([*arguments]).encode()).hexdigest()[:8]
    return base_dir / COMMANDS_DIR / f"{command}-{digest}"
