"""Directory of a submitted job: `<run directory>/submissions/<number>/`.

    config.yaml  words.json   resolved configuration and overrides of a training job
                              (hlat.config.frozen_config)
    code/                     snapshot of the program
    job.json                  commands and settings of each attempt
    receipts.jsonl            job ids that the scheduler returned
    attempts.jsonl            start and end of each attempt
    <job id>.log              output of the job

A job runs the submitted program even if the checkout changes while the job waits. It can be
resubmitted and listed after the scheduler has deleted its own record. An evaluation is submitted
from `<run directory>/evaluations/<name>/`.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.tracking import sweep_log
from hlat.tracking.jsonl_log import JsonlLog
from hlat.tracking.run_directory import EVALUATIONS_DIR

_JOB_FILE = "job.json"


@dataclass(frozen=True)
class Submission:
    """Commands and settings of each attempt.

    Attributes:
        commands: Commands that run once per node, in order, until one fails.
        trains: True if the last command trains the run.
        scores: Directory of an evaluation's scores; None: the job evaluates nothing. A job that
            neither trains nor evaluates compiles graphs for the run.
        options: Options of srun.
        open_files: Soft limit of open files, up to the hard limit.
        after: Name of the submission that must succeed first; None: no dependency.
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
    def action(self) -> str:
        """Verb for messages."""
        return "trains" if self.trains else "evaluates" if self.scores else "compiles"


@dataclass(frozen=True)
class SubmissionDir:
    """Directory of a submission."""

    path: Path

    @property
    def run_dir(self) -> Path:
        """Directory of the run or evaluation."""
        return self.path.parent.parent

    @property
    def code_dir(self) -> Path:
        """Snapshot of the program."""
        return self.path / "code"

    @property
    def receipts(self) -> JsonlLog:
        """Log with `job` and `time` of each submission to the scheduler."""
        return JsonlLog(self.path / "receipts.jsonl")

    @property
    def attempts(self) -> JsonlLog:
        """Log of the attempts, with an `event` of start, end or exclude."""
        return JsonlLog(self.path / "attempts.jsonl")

    @property
    def last_job_id(self) -> str | None:
        """Job id of the last submission to the scheduler; None before the first."""
        rows = self.receipts.read_rows()
        return str(rows[-1]["job"]) if rows else None

    def build_log_path(self, job_id: str) -> Path:
        """Return the path of a job's output; Slurm replaces `%j` with the job id."""
        return self.path / f"{job_id}.log"

    @property
    def prerequisite(self) -> "SubmissionDir | None":
        """Submission that must succeed before this one."""
        after = self.load().after
        return None if after is None else SubmissionDir(self.path.parent / after)

    @property
    def script_path(self) -> Path:
        """Batch script, with the name that submitit assigns."""
        first = str(self.receipts.read_rows()[0]["job"])
        return self.path / f"{first}_submission.sh"

    def save(self, submission: Submission) -> None:
        """Write job.json."""
        (self.path / _JOB_FILE).write_text(json.dumps(asdict(submission), indent=2) + "\n")

    def load(self) -> Submission:
        """Read job.json.

        Raises:
            ConfigError: The file is missing or invalid.
        """
        try:
            fields: dict[str, Any] = json.loads((self.path / _JOB_FILE).read_text())
            return Submission(**fields)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.path} contains no valid submission") from error


def create_submission_dir(run_dir: Path) -> SubmissionDir:
    """Create the next directory of a run's submissions."""
    parent = run_dir / "submissions"
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
        directory = parent / str(max(numbers, default=0) + 1)
        try:
            directory.mkdir()
        except FileExistsError:  # created by another process
            continue
        return SubmissionDir(directory)


def find_latest_submission(run_dir: Path) -> SubmissionDir | None:
    """Return the newest submission of a run or evaluation, or None."""
    paths = [path.parent for path in (run_dir / "submissions").glob(f"*/{_JOB_FILE}")]
    numbered = [path for path in paths if path.name.isdecimal()]
    return SubmissionDir(max(numbered, key=lambda path: int(path.name))) if numbered else None


def find_submitted_runs(directory: Path) -> Iterator[Path]:
    """Yield the directories of submitted runs and evaluations in a directory.

    The directory is a submitted run or evaluation, the parent directory of runs, the directory of a
    run's evaluations, or a sweep.

    Raises:
        ConfigError: The directory does not exist.
    """
    if sweep_log.is_sweep_dir(directory):
        yield from sweep_log.list_run_dirs(directory)
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory of a run, of runs, or of a sweep")
    if find_latest_submission(directory) is not None:
        yield directory
        return
    for path in (directory, *sorted(directory.iterdir())):
        candidates = (path, *sorted((path / EVALUATIONS_DIR).glob("*")))
        yield from (run for run in candidates if find_latest_submission(run) is not None)
