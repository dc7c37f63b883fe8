"""State of the jobs of a campaign, derived from its log, receipts of the scheduler and results.

`stages.jsonl` in the directory of the campaign has a row for each start, end and submission. The
state of a submitted job is that of its newest submission, so that `hlat jobs` may cancel it and
submit it again.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.jobs.job_table import JobRow, load_job_rows
from hlat.jobs.slurm_commands import PENDING_STATES
from hlat.jobs.stage_job import StageJob
from hlat.jobs.submission import find_latest_submission
from hlat.tracking.jsonl_log import JsonlLog
from hlat.tracking.run_directory import is_in_use, lock_run_dir

LOCAL = "local"
"""Name of the launcher that runs jobs on this machine, as in the log."""
SLURM = "slurm"
KUBERNETES = "kubernetes"
_LOCK_ATTEMPTS, _LOCK_INTERVAL_S = 5, 0.2
_INTERRUPTED_CODES = (ExitCode.PREEMPTED, 130)
_EXIT_DETAILS: dict[int, str] = {
    ExitCode.CONFIGURATION: "invalid configuration, exit code 2",
    ExitCode.DIVERGED: "diverged, exit code 3",
}


class StageState(Enum):
    """State of a job."""

    waiting = "waiting"
    """A dependency has not finished."""
    ready = "ready"
    """All dependencies have finished."""
    submitted = "submitted"
    """A scheduler has the job."""
    running = "running"
    interrupted = "interrupted"
    """The job was stopped and can continue."""
    failed = "failed"
    finished = "finished"

    @property
    def has_started(self) -> bool:
        """True if the job runs or has finished."""
        return self in (StageState.running, StageState.finished)


@dataclass(frozen=True)
class StageStatus:
    """State of a job.

    `is_changed` is True if the job was started or submitted with other settings than the present
    ones; `job_id` is that of the scheduler; `detail` is the reason of the state; `start_time` and
    `end_time` are None if unknown.
    """

    state: StageState
    is_changed: bool = False
    job_id: str = ""
    detail: str = ""
    start_time: float | None = None
    end_time: float | None = None

    @property
    def is_unchangeable(self) -> bool:
        """True if the settings changed after the start of the job, which continues with its own."""
        return self.is_changed and self.state.has_started


class CampaignLog:
    """Log of a campaign directory, and its lock."""

    def __init__(self, campaign_dir: Path) -> None:
        self.campaign_dir = campaign_dir
        self._log = JsonlLog(campaign_dir / "stages.jsonl")

    def append(self, event: str, job: str, **values: Any) -> None:
        """Add an event of a job: start, end, submit or reset."""
        self._log.append({"event": event, "stage": job, "time": time.time(), **values})

    def load_last_rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return, by job, the rows from its last start or submission on."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in self._log.read_rows():
            if row["event"] in ("start", "submit"):
                rows[row["stage"]] = [row]
            elif row["event"] == "reset":
                rows.pop(row["stage"], None)
            elif row["stage"] in rows:
                rows[row["stage"]].append(row)
        return rows

    def load_overrides(self) -> list[str]:
        """Return the launcher and its settings of the last submission; empty without one."""
        rows = [row for row in self._log.read_rows() if row["event"] in ("start", "submit")]
        return [*rows[-1].get("overrides", [])] if rows else []

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the campaign for one command.

        Raises:
            ConfigError: Another command uses the campaign.
            OSError: The directory is not writable.
        """
        self.campaign_dir.mkdir(parents=True, exist_ok=True)
        for attempt in reversed(range(_LOCK_ATTEMPTS)):
            try:
                file = lock_run_dir(self.campaign_dir)
                break
            except BlockingIOError as error:
                if attempt == 0:
                    raise ConfigError(
                        f"another hlat campaign command uses {self.campaign_dir}; wait until it has"
                        " ended, or print the state with status=true"
                    ) from error
                time.sleep(_LOCK_INTERVAL_S)  # a status command locks it for a moment
        with file:
            yield

    @property
    def is_locked(self) -> bool:
        """True if a command uses the campaign."""
        return is_in_use(self.campaign_dir)


def load_statuses(
    log: CampaignLog, jobs: Sequence[StageJob], is_locked: bool
) -> dict[str, StageStatus]:
    """Return the status of each job by name; `jobs` are in topological order.

    `is_locked` is True if another process runs the campaign on this machine.

    Raises:
        ConfigError: A job was submitted to Slurm, which is not available.
    """
    rows = log.load_last_rows()
    started = [job for job in jobs if job.name in rows]
    submitted = [job for job in started if rows[job.name][0]["launcher"] == SLURM]
    job_rows = load_submitted_rows(submitted, rows)
    submitted_names = {job.name for job in submitted}
    statuses: dict[str, StageStatus] = {}
    for job in jobs:
        status = None
        if job.name in rows and (job.name in job_rows or job.name not in submitted_names):
            status = _build_status(job, rows[job.name], job_rows.get(job.name), is_locked)
        if status is None:
            is_ready = all(statuses[name].state is StageState.finished for name in job.after)
            status = StageStatus(StageState.ready if is_ready else StageState.waiting)
        statuses[job.name] = status
    return statuses


def load_submitted_rows(
    jobs: Sequence[StageJob], rows: dict[str, list[dict[str, Any]]]
) -> dict[str, JobRow]:
    """Return the newest job of Slurm by name of the job, unless it is older than the log's row."""
    recent = {}
    for job in jobs:
        directory = Path(rows[job.name][0].get("directory", job.directory)).absolute()
        submission = find_latest_submission(directory)
        receipts = submission.receipts.read_rows() if submission else []
        if receipts and receipts[-1]["time"] >= rows[job.name][0]["time"]:
            recent[directory] = job.name
    return {recent[row.submission_dir.run_dir]: row for row in load_job_rows([*recent])}


def _build_status(
    job: StageJob, rows: list[dict[str, Any]], job_row: JobRow | None, is_locked: bool
) -> StageStatus | None:
    """Return the status of a started or submitted job; None if its result was removed."""
    begin = rows[0]
    state, detail, end_time = _find_state(job, rows, job_row, is_locked)
    is_visible = begin["launcher"] != KUBERNETES
    if state is StageState.finished and is_visible and not Path(job.result).exists():
        return None
    is_changed = begin["digest"] != job.digest
    if state is StageState.submitted:
        is_changed |= begin["settings"] != job.launcher.get(begin["launcher"], {})
    return StageStatus(
        state,
        is_changed,
        "" if job_row is None else job_row.job_id,
        detail,
        begin["time"],
        end_time,
    )


def _find_state(
    job: StageJob, rows: list[dict[str, Any]], job_row: JobRow | None, is_locked: bool
) -> tuple[StageState, str, float | None]:
    """Return state, detail and time of the end."""
    if job_row is not None:
        return _find_submitted_state(job_row)
    if rows[-1]["event"] == "end":
        code, end_time = rows[-1]["exit"], rows[-1]["time"]
        if code == ExitCode.FINISHED:
            return StageState.finished, "", end_time
        if code in _INTERRUPTED_CODES:
            return StageState.interrupted, "stopped by a signal", end_time
        return StageState.failed, _EXIT_DETAILS.get(code, f"exit code {code}"), end_time
    if rows[0]["launcher"] == KUBERNETES:
        return StageState.submitted, "to Kubernetes", None
    if job.kind == "average" and rows[0]["digest"] == job.digest and Path(job.result).exists():
        return StageState.finished, "", None  # written in one step before the process was killed
    if is_locked:
        return StageState.running, "on this machine", None
    return StageState.interrupted, "its process was killed", None


def _find_submitted_state(row: JobRow) -> tuple[StageState, str, float | None]:
    ends = [end["time"] for end in row.submission_dir.attempts.read_rows() if end["event"] == "end"]
    end_time = ends[-1] if ends else None
    if row.is_complete:
        return StageState.finished, "", end_time
    if row.is_active:
        is_pending = row.state in PENDING_STATES and row.attempt == 0
        detail = row.event if row.state in PENDING_STATES else f"attempt {row.attempt}"
        if row.step is not None and not is_pending:
            detail = f"{detail}, step {row.step}"
        return (StageState.submitted if is_pending else StageState.running), detail, None
    state = StageState.interrupted if row.state == "INTERRUPTED" else StageState.failed
    return state, row.state, end_time
