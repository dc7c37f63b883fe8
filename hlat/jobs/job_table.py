"""Table of submitted runs and evaluations with the state of their jobs."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.command_job import COMMANDS_DIR
from hlat.config.config_errors import ExitCode
from hlat.jobs import slurm_commands
from hlat.jobs.slurm_commands import ACTIVE_STATES, JobState
from hlat.jobs.submission import SubmissionDir, find_latest_submission, load_all_scores
from hlat.tracking.jsonl_log import open_events_log, open_metrics_log
from hlat.tracking.run_directory import EVALUATIONS_DIR
from hlat.tracking.text_format import format_table

_COMPLETED, _DIVERGED, _CANCELLED = "COMPLETED", "DIVERGED", "CANCELLED"
_FINAL_STATES = {
    ExitCode.FINISHED: _COMPLETED,
    ExitCode.CONFIGURATION: "REFUSED",
    ExitCode.DIVERGED: _DIVERGED,
    ExitCode.PREEMPTED: "INTERRUPTED",
}
_HEADINGS = ("run", "job", "state", "attempt", "nodes", "step", "loss", "last event")


@dataclass(frozen=True)
class JobRow:
    """Newest job of a run or evaluation, and the job that must succeed before it.

    Attributes:
        state: State in Slurm, or the state that follows from the exit code.
        step: Last step with metrics or scores; None: none yet.
        event: Last event of the run, the newest scores, or the reason of a pending state.
    """

    submission_dir: SubmissionDir
    action: str
    job_id: str
    state: str
    attempt: int
    nodes: str
    step: int | None
    loss: float | None
    event: str
    prerequisite: "JobRow | None"

    @property
    def is_active(self) -> bool:
        """True if the job runs or may run."""
        return self.state in ACTIVE_STATES

    @property
    def is_complete(self) -> bool:
        """True if the job has succeeded."""
        return self.state == _COMPLETED

    @property
    def has_failed(self) -> bool:
        """True if the job has ended before it was complete."""
        return not self.is_active and not self.is_complete

    @property
    def ended_on_purpose(self) -> bool:
        """True if the job diverged or was cancelled, but not because its prerequisite failed."""
        if self.prerequisite is not None and self.prerequisite.has_failed:
            return False
        return self.state in (_DIVERGED, _CANCELLED)

    @property
    def active_job_ids(self) -> list[str]:
        """Ids of the active jobs, with the prerequisite first."""
        jobs = (self.prerequisite, self)
        return [job.job_id for job in jobs if job is not None and job.is_active]


def load_job_rows(run_dirs: Sequence[Path], retry: bool = False) -> list[JobRow]:
    """Return the newest job of each run or evaluation; `retry` as in `query_job_states`.

    Raises:
        ConfigError: Slurm is not available.
    """
    submissions = [path for run_dir in run_dirs if (path := find_latest_submission(run_dir))]
    prerequisites = [first for path in submissions if (first := path.prerequisite)]
    job_ids = [job_id for path in submissions + prerequisites if (job_id := path.last_job_id)]
    states = slurm_commands.query_job_states(job_ids, retry)
    return [row for path in submissions if (row := _build_row(path, states))]


def cancel_job_rows(job_rows: Sequence[JobRow]) -> None:
    """Cancel active jobs, and log it, as Slurm deletes their state.

    Raises:
        ConfigError: scancel fails.
    """
    slurm_commands.cancel_jobs([job for row in job_rows for job in row.active_job_ids])
    for row in job_rows:
        cancelled = {"event": "cancel", "job": row.job_id, "time": time.time()}
        row.submission_dir.attempts.append(cancelled)


def format_job_table(job_rows: Sequence[JobRow]) -> str:
    """Return the rows as an aligned table."""
    return "\n".join(format_table(_HEADINGS, [_format_cells(row) for row in job_rows]))


def format_job_json(job_rows: Sequence[JobRow]) -> str:
    """Return the rows as a JSON list of objects."""
    return json.dumps([_build_json_object(row) for row in job_rows], indent=2)


def _build_json_object(row: JobRow) -> dict[str, Any]:
    return {
        "run": str(row.submission_dir.run_dir),
        "job": row.job_id,
        "action": row.action,
        "state": row.state,
        "attempt": row.attempt,
        "nodes": row.nodes,
        "step": row.step,
        "loss": row.loss,
        "event": row.event,
        "log": str(row.submission_dir.build_log_path(row.job_id)),
        "prerequisite": None if row.prerequisite is None else _build_json_object(row.prerequisite),
    }


def _build_row(submission_dir: SubmissionDir, states: dict[str, JobState]) -> JobRow | None:
    job_id, first_dir = submission_dir.last_job_id, submission_dir.prerequisite
    if job_id is None:
        return None
    prerequisite = None if first_dir is None else _build_row(first_dir, states)
    rows = submission_dir.attempts.read_rows()
    state, attempts = states.get(job_id), [row for row in rows if row["job"] == job_id]
    starts = [row for row in attempts if row["event"] == "start"]
    progress, event = _load_progress(submission_dir)
    if prerequisite is not None and not attempts and not prerequisite.is_complete:
        event = f"job {prerequisite.job_id} compiles before: {prerequisite.state}"
    elif state is not None and state.name == "PENDING":
        event = f"waits: {state.reason}"
    return JobRow(
        submission_dir=submission_dir,
        action=submission_dir.load().action,
        job_id=job_id,
        state=_resolve_state(state, attempts),
        attempt=starts[-1]["attempt"] if starts else 0,
        nodes=(state.nodes if state else "") or (starts[-1]["nodes"] if starts else ""),
        step=progress.get("step"),
        loss=progress.get("loss"),
        event=event,
        prerequisite=prerequisite,
    )


def _load_progress(submission_dir: SubmissionDir) -> tuple[dict[str, Any], str]:
    """Return the last row of metrics or scores, and a summary of the last event."""
    scores_dir = submission_dir.load().scores
    if scores_dir is not None:
        rows = load_all_scores(Path(scores_dir))
        row = rows[-1] if rows else {"scores": {}}
        return row, ", ".join(f"{name} {value:.1f}" for name, value in row["scores"].items())
    row = open_metrics_log(submission_dir.run_dir).read_last_row() or {}
    event = open_events_log(submission_dir.run_dir).read_last_row()
    if event is None:
        return row, ""
    reason = event.get("reason") or event.get("reasons") or ""
    return row, f"{event['event']} {reason}".rstrip()


def _resolve_state(state: JobState | None, attempts: list[dict[str, Any]]) -> str:
    """Return Slurm's state, or the one that follows from the recorded end of the last attempt.

    FAILED is any exit code other than 0, and a controller that was down for the end of a job
    records a TIMEOUT or NODE_FAIL.
    A job that Slurm has deleted is LOST if it has not started, and KILLED if its end is not logged.
    """
    has_ended = bool(attempts) and attempts[-1]["event"] == "end"
    is_final = has_ended and attempts[-1].get("again") is None
    if state is not None and (
        state.name in ACTIVE_STATES or not (is_final or state.name in ("FAILED", _COMPLETED))
    ):
        return state.name
    is_cancelled = any(row["event"] == "cancel" or row.get("cancelled") for row in attempts)
    if has_ended:
        name = _FINAL_STATES.get(attempts[-1]["exit"], "FAILED")
        return _CANCELLED if is_cancelled and name in ("INTERRUPTED", "FAILED") else name
    if state is not None:
        return state.name
    return _CANCELLED if is_cancelled else "KILLED" if attempts else "LOST"


def _format_cells(row: JobRow) -> tuple[str, ...]:
    run_dir = row.submission_dir.run_dir
    is_command = run_dir.parent.name in (EVALUATIONS_DIR, COMMANDS_DIR)
    prefix = f"{run_dir.parent.parent.name}: " if is_command else ""
    return (
        f"{prefix}{run_dir.name}",
        row.job_id,
        row.state,
        str(row.attempt),
        row.nodes,
        "" if row.step is None else str(row.step),
        "" if row.loss is None else f"{row.loss:.4f}",
        row.event,
    )
