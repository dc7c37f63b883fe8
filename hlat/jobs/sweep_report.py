"""Comparison of the runs of a sweep, written by the job that ends last.

Each job logs its end before it reads whether the others have ended, so the last one finds all of
them ended, without a lock. Two jobs that end at the same time may both write the same files.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from hlat.jobs.submission import SubmissionDir, find_latest_submission
from hlat.tracking import sweep_log

_TIMEOUT_S = 900
"""Limit of the time to write a report, during which the nodes of the job are allocated."""


def write_report_if_last(program: Sequence[str], sweep_dir: Path) -> None:
    """Write the comparison if all jobs of the sweep have ended.

    Args:
        program: Command that runs a module.
        sweep_dir: Directory of the sweep.
    """
    if not has_ended(sweep_dir):
        return
    print(f"hlat: all jobs of {sweep_dir} have ended", flush=True)
    command = [*program, "hlat.report", str(sweep_dir)]
    try:
        subprocess.run(command, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"hlat: the report of the sweep was not written: {error}", flush=True)


def has_ended(sweep_dir: Path) -> bool:
    """Return True if no job of a sweep runs or will run again."""
    submissions = [find_latest_submission(path) for path in sweep_log.list_run_dirs(sweep_dir)]
    return bool(submissions) and all(path and _find_end(path) for path in submissions)


def _find_end(submission_dir: SubmissionDir) -> str | None:
    """Return how the last job of a submission ended: success, failure or cancel; None: it has not.

    A job that was killed without a log of its end has not ended.
    """
    job = submission_dir.last_job_id
    rows = [row for row in submission_dir.attempts.read_rows() if row["job"] == job]
    last = rows[-1] if rows else {"event": None}
    if last["event"] == "cancel":
        return "cancel"
    if last["event"] == "end" and last.get("again") is None:
        return "failure" if last["exit"] else "success"
    first = submission_dir.prerequisite
    has_failed_before = first is not None and _find_end(first) in ("failure", "cancel")
    return "cancel" if not rows and has_failed_before else None
