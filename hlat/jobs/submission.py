"""Directory of a submitted job: `<run directory>/submissions/<number>/`.

    config.yaml  words.json   resolved configuration and overrides of a training job
                              (hlat.config.frozen_config)
    code.zip                  archive of the program; of a sweep: in the sweep directory
    submission.sh             batch script; of a job array: in its directory
    job.json                  commands and settings of each attempt
    receipts.jsonl            job ids that the scheduler returned; of a job array: in its directory
    attempts.jsonl            start and end of each attempt; cancellations by `hlat jobs`
    <job id>.log              output of the job

A job runs the submitted program even if the checkout changes while the job waits. It can be
resubmitted and listed after the scheduler has deleted its own record. An evaluation is submitted
from `<run directory>/evaluations/<name>/`. Points of a sweep with equal resources are tasks of one
job array (hlat.jobs.job_array).
"""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from hlat.config.command_job import COMMANDS_DIR
from hlat.config.config_errors import ConfigError
from hlat.jobs import slurm_commands
from hlat.jobs.job_array import JobArray, create_numbered_dir, find_script
from hlat.recovery import host_info
from hlat.tracking import sweep_log
from hlat.tracking.jsonl_log import JsonlLog
from hlat.tracking.run_directory import (
    EVALUATIONS_DIR,
    SUBMISSION_FILE,
    SUBMISSIONS_DIR,
    build_unwritable_error,
    find_latest_submission_path,
)

_LOCK_FILE = ".lock"
_OTHER_OPEN_FILES = 256
"""Files that a command opens besides one lock per run."""


@dataclass(frozen=True)
class Submission:
    """Commands and settings of each attempt.

    Attributes:
        commands: Commands that run once per node, in order, until one fails.
        trains: True if the last command trains the run.
        signal_s: Time between Slurm's early signal and the time limit; Slurm may signal earlier.
        scores: Directory of an evaluation's scores; None: the job evaluates nothing. A job that
            neither trains nor evaluates compiles graphs for the run.
        options: Options of srun.
        open_files: Soft limit of open files, up to the hard limit.
        after: Name of the submission that must succeed first; None: no dependency.
        array: Directory of the job array; None: the job is not a task of an array.
        task: Index in the job array.
        verb: Verb for messages about a job that does not train.
        sweep: Directory of the sweep, of which the last job writes the comparison; None: one run.
    """

    nodes: int
    commands: list[list[str]]
    trains: bool
    environment: dict[str, str]
    options: list[str]
    max_attempts: int
    open_files: int
    signal_s: int = 300
    after: str | None = None
    scores: str | None = None
    array: str | None = None
    task: int = 0
    verb: str = "compiles"
    sweep: str | None = None

    @property
    def action(self) -> str:
        """Verb for messages."""
        return "trains" if self.trains else "evaluates" if self.scores else self.verb


@dataclass(frozen=True)
class SubmissionDir:
    """Directory of a submission."""

    path: Path

    @property
    def run_dir(self) -> Path:
        """Directory of the run or evaluation."""
        return self.path.parent.parent

    @property
    def receipts(self) -> JsonlLog:
        """Log with `job` and `time` of each submission to the scheduler, except of an array."""
        return JsonlLog(self.path / "receipts.jsonl")

    @property
    def attempts(self) -> JsonlLog:
        """Log of the attempts, with an `event`: start, end, exclude, requeue_failed or cancel."""
        return JsonlLog(self.path / "attempts.jsonl")

    @property
    def last_job_id(self) -> str | None:
        """Job id of the last submission to the scheduler; None before the first."""
        if not (self.path / SUBMISSION_FILE).exists():
            return None
        submission = self.load()
        if submission.array is not None:
            return JobArray(Path(submission.array)).find_job_id(submission.task)
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
        """Batch script of a job that is not a task of an array."""
        return find_script(self.path)

    def save(self, submission: Submission) -> None:
        """Write job.json."""
        (self.path / SUBMISSION_FILE).write_text(json.dumps(asdict(submission), indent=2) + "\n")

    def load(self) -> Submission:
        """Read job.json.

        Raises:
            ConfigError: The file is missing or invalid.
        """
        try:
            fields: dict[str, Any] = json.loads((self.path / SUBMISSION_FILE).read_text())
            return Submission(**fields)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.path} contains no valid submission") from error


def create_submission_dir(run_dir: Path) -> SubmissionDir:
    """Create the next directory of a run's submissions."""
    return SubmissionDir(create_numbered_dir(run_dir / SUBMISSIONS_DIR))


def submit_jobs(submission_dirs: Sequence[SubmissionDir], dependency: str | None = None) -> str:
    """Submit a job, or tasks of one array, log the receipt, and return the id of job or array.

    `dependency` is the value of `sbatch --dependency`, in place of that of the script.

    Raises:
        UnknownJobError: The jobs may exist; they must not be submitted again.
        ConfigError: Slurm rejects the jobs, or sbatch cannot be started.
    """
    first, submissions = submission_dirs[0], [path.load() for path in submission_dirs]
    if submissions[0].array is None:
        job_id = slurm_commands.submit_script(first.script_path, dependency)
        first.receipts.append({"job": job_id, "time": time.time()})
        return job_id
    array, tasks = JobArray(Path(submissions[0].array)), sorted(s.task for s in submissions)
    limit = slurm_commands.parse_array_limit(array.script_path.read_text())
    option = slurm_commands.format_array(tasks, limit)
    job_id = slurm_commands.submit_script(array.script_path, dependency, option)
    array.log_receipt(job_id, tasks)
    return job_id


def submit_after_prerequisites(submission_dirs: Sequence[SubmissionDir]) -> str | None:
    """Submit a job, or tasks of one array, and the prerequisites before; raises as `submit_jobs`.

    Return the job id of the prerequisites, None without any. They are cancelled if Slurm rejects
    the jobs.
    """
    prerequisites = [first for path in submission_dirs if (first := path.prerequisite) is not None]
    if not prerequisites:
        submit_jobs(submission_dirs)
        return None
    first_id = submit_jobs(prerequisites)
    is_array = prerequisites[0].load().array is not None
    try:
        submit_jobs(submission_dirs, slurm_commands.format_dependency(first_id, is_array))
    except ConfigError:
        slurm_commands.cancel_jobs([first_id])
        raise
    return first_id


@contextmanager
def lock_submissions(run_dirs: Iterable[Path]) -> Iterator[None]:
    """Lock the submissions of runs or commands, from the search for jobs to the receipts.

    Raises:
        ConfigError: Another command submits one of them, or a directory is not writable.
    """
    directories = sorted({run_dir / SUBMISSIONS_DIR for run_dir in run_dirs})
    host_info.raise_open_file_limit(len(directories) + _OTHER_OPEN_FILES)
    with ExitStack() as locks:
        for directory in directories:
            locks.enter_context(_lock_directory(directory))
        yield


@contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """Lock a directory of submissions, which is removed if it has none at the end."""
    file = directory / _LOCK_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError as error:
        raise build_unwritable_error(directory.parent, error) from error
    with lock:
        try:
            is_locked = _try_lock(lock, file)
        except OSError as error:
            raise ConfigError(
                f"{directory.parent}: its file system cannot lock files ({error.strerror}), so two "
                "commands could submit a job twice; set run.root to another file system"
            ) from error
        if not is_locked:
            raise ConfigError(
                f"{directory.parent}: another command submits its jobs; wait until that command "
                "has ended, then repeat this one if hlat jobs does not list them"
            )
        try:
            yield
        finally:
            if [path.name for path in directory.iterdir()] == [_LOCK_FILE]:
                file.unlink()
                with suppress(OSError):  # not empty
                    directory.rmdir()
                    directory.parent.rmdir()


def _try_lock(lock: IO[str], file: Path) -> bool:
    """Return True if an open file is locked, and was not removed by its last owner."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock.fileno()), file.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def find_latest_submission(run_dir: Path) -> SubmissionDir | None:
    """Return the newest submission of a run or evaluation, or None."""
    path = find_latest_submission_path(run_dir)
    return None if path is None else SubmissionDir(path)


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
        candidates = (
            path,
            *sorted((path / EVALUATIONS_DIR).glob("*")),
            *sorted((path / COMMANDS_DIR).glob("*")),
        )
        yield from (run for run in candidates if find_latest_submission(run) is not None)


def load_all_scores(scores_dir: Path) -> list[dict[str, Any]]:
    """Return the content of all scores files, sorted by modification time."""
    rows = []
    for file in sorted(scores_dir.glob("*.json"), key=lambda file: file.stat().st_mtime):
        with suppress(ValueError):  # the evaluation reports invalid files
            row = json.loads(file.read_text())
            if isinstance(row, dict) and {"scores", "tasks"} <= row.keys():
                rows.append(row)
    return rows
