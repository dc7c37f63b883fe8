"""What a launcher has sent, as a folder beside the run: `<run folder>/submissions/<number>/`.

    config.yaml  words.json   what the job trains, and what was typed (hlat.config.frozen); an
                              evaluation has neither, as job.json says all of it
    code/                     the program as it was, which the job runs
    job.json                  what each attempt starts
    receipts.jsonl            the numbers that the scheduler gave
    attempts.jsonl            how each attempt began, and ended
    <number>.log              what the job has said

So a job that waits for days does what was sent, whatever becomes of the checkout; and it can be
sent again, listed and followed without the scheduler's memory, which is short. An evaluation has a
folder of its own in place of the run's, `<run folder>/evaluations/<name>/`.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError
from hlat.tracking import sweep
from hlat.tracking.journal import Journal
from hlat.tracking.run_folder import EVALUATIONS

_JOB = "job.json"
_CODE = "code"


@dataclass(frozen=True)
class Submission:
    """What each attempt of a job starts.

    Attributes:
        nodes: How many.
        commands: What runs once on each, one after the other until one fails.
        trains: Whether the last of them is the run, whose folder tells how it went.
        scores: Of an evaluation, the folder of its scores, which tell how far it is; None: it is
            none. What neither trains nor evaluates makes something that the run needs.
        environment: Variables by name.
        options: Of srun.
        max_attempts: Times that the job may be started.
        open_files: Files that its processes may open, where the hard limit allows it.
        after: Name of the submission whose job must have succeeded before; None: of none.
    """

    nodes: int
    commands: list[list[str]]
    trains: bool
    environment: dict[str, str]
    options: list[str]
    max_attempts: int
    open_files: int
    after: str | None = None
    scores: str | None = None

    @property
    def does(self) -> str:
        """What the job does, in a word."""
        return "trains" if self.trains else "evaluates" if self.scores else "compiles"


@dataclass(frozen=True)
class Place:
    """The folder of a submission.

    Attributes:
        folder: Its path.
    """

    folder: Path

    @property
    def run_folder(self) -> Path:
        """That of the run, or of the evaluation."""
        return self.folder.parent.parent

    @property
    def code(self) -> Path:
        """The program that the job runs."""
        return self.folder / _CODE

    @property
    def receipts(self) -> Journal:
        """Rows with `job` and `time`, one for each time it was sent."""
        return Journal(self.folder / "receipts.jsonl")

    @property
    def attempts(self) -> Journal:
        """Rows of two kinds: `event` is start or end."""
        return Journal(self.folder / "attempts.jsonl")

    @property
    def job(self) -> str | None:
        """The number that the scheduler gave last; None: it was never sent."""
        rows = self.receipts.rows()
        return str(rows[-1]["job"]) if rows else None

    def log(self, job: str) -> Path:
        """What a job has said; `%j` is the number to Slurm."""
        return self.folder / f"{job}.log"

    @property
    def before(self) -> "Place | None":
        """The submission whose job must have succeeded before this one's."""
        after = self.load().after
        return None if after is None else Place(self.folder.parent / after)

    @property
    def script(self) -> Path:
        """What sbatch was given, by the name that submitit gave it."""
        first = str(self.receipts.rows()[0]["job"])
        return self.folder / f"{first}_submission.sh"

    def save(self, submission: Submission) -> None:
        """Write what each attempt starts."""
        (self.folder / _JOB).write_text(json.dumps(asdict(submission), indent=2) + "\n")

    def load(self) -> Submission:
        """Read what each attempt starts.

        Raises:
            ConfigError: The folder holds no submission.
        """
        try:
            fields: dict[str, Any] = json.loads((self.folder / _JOB).read_text())
            return Submission(**fields)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.folder} holds no submission that can be read") from error


def make(run_folder: Path) -> Place:
    """Make the next folder for what is to be sent.

    Raises:
        OSError: The disk refuses it.
    """
    parent = run_folder / "submissions"
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        taken = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
        folder = parent / str(max(taken, default=0) + 1)
        try:
            folder.mkdir()
        except FileExistsError:  # somebody else was faster
            continue
        return Place(folder)


def newest(run_folder: Path) -> Place | None:
    """What was sent last of a run; None: nothing ever was."""
    found = [path for path in (run_folder / "submissions").glob("*") if (path / _JOB).is_file()]
    numbered = [path for path in found if path.name.isdecimal()]
    return Place(max(numbered, key=lambda path: int(path.name))) if numbered else None


def runs(folder: Path) -> Iterator[Path]:
    """The folders of runs and evaluations that were sent, in `folder`.

    Args:
        folder: That of a run or of an evaluation, which is meant alone, or of several: of runs, of
            the evaluations of a run, or of a sweep.

    Raises:
        ConfigError: It is none of these.
    """
    if sweep.is_sweep(folder):
        yield from sweep.run_folders(folder)
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder of a run, of runs, or of a sweep")
    if newest(folder) is not None:
        yield folder
        return
    for path in (folder, *sorted(folder.iterdir())):
        found = (path, *sorted((path / EVALUATIONS).glob("*")))
        yield from (one for one in found if newest(one) is not None)
