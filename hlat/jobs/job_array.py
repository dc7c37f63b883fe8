"""Directory of a job array: `<sweep directory>/arrays/<number>/`.

    <task>                    link to the submission directory of a task
    submission.sh             batch script
    receipts.jsonl            job id and tasks of each submission to the scheduler

One row of receipts.jsonl has the receipts of all tasks, so an interruption cannot separate them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.tracking.jsonl_log import JsonlLog

if TYPE_CHECKING:
    from hlat.jobs.submission import SubmissionDir

ARRAYS_DIR = "arrays"
"""Directory of the job arrays in a sweep directory."""
SCRIPT_FILE = "submission.sh"
"""Batch script of a job or job array."""


@dataclass(frozen=True)
class JobArray:
    """Directory of a job array."""

    path: Path

    @property
    def receipts(self) -> JsonlLog:
        """Log with `job`, `tasks` and `time` of each submission to the scheduler."""
        return JsonlLog(self.path / "receipts.jsonl")

    @property
    def script_path(self) -> Path:
        """Batch script."""
        return find_script(self.path)

    def link_tasks(self, submission_dirs: Sequence["SubmissionDir"]) -> None:
        """Link the submission directories of all tasks."""
        for task, submission_dir in enumerate(submission_dirs):
            (self.path / str(task)).symlink_to(submission_dir.path)

    def log_receipt(self, job_id: str, tasks: Sequence[int]) -> None:
        """Log the job id of submitted tasks."""
        self.receipts.append({"job": job_id, "tasks": [*tasks], "time": time.time()})

    def find_job_id(self, task: int) -> str | None:
        """Return the job id of the last submission of a task; None before the first."""
        for row in reversed(self.receipts.read_rows()):
            if task in row["tasks"]:
                return f"{row['job']}_{task}"
        return None


def create_numbered_dir(parent: Path) -> Path:
    """Create the directory with the next number in `parent`, which is created if necessary."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
        directory = parent / str(max(numbers, default=0) + 1)
        try:
            directory.mkdir()
        except FileExistsError:  # created by another process
            continue
        return directory


def find_script(directory: Path) -> Path:
    """Return the batch script in a directory; earlier versions wrote `<job id>_submission.sh`."""
    return min(directory.glob(f"*{SCRIPT_FILE}"), default=directory / SCRIPT_FILE)
