"""Slurm commands, executed without a shell.

Functions raise ConfigError if the command is missing, fails or does not answer.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.config.config_errors import ConfigError

_SQUEUE_FORMAT = "%i|%T|%N|%r"
"""Job id, state, nodes and reason."""
_TIMEOUT_S = 60


@dataclass(frozen=True)
class JobState:
    """State of a job in squeue: state, abbreviated node list, and reason of a pending state."""

    name: str
    nodes: str
    reason: str


def query_job_states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Return the states of jobs; Slurm deletes jobs a few minutes after their end."""
    if not job_ids:
        return {}
    # squeue with job ids fails for all of them if one is unknown
    output = _run_checked(
        "squeue", "--noheader", "--states=all", f"--format={_SQUEUE_FORMAT}", "--me"
    )
    rows = [line.strip().split("|", 3) for line in output.splitlines()]
    return {row[0]: JobState(*row[1:]) for row in rows if row[0] in job_ids}


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """Cancel jobs; raise ConfigError if scancel fails."""
    _run_checked("scancel", *job_ids)


def submit_script(script: Path, after_job: str | None) -> str:
    """Submit a batch script that runs after the success of `after_job`, and return the job id."""
    # An empty dependency overrides one of an earlier job in the script
    dependency = format_dependency(after_job) if after_job else ""
    output = _run_checked("sbatch", "--parsable", f"--dependency={dependency}", str(script))
    return output.strip().partition(";")[0]


def format_dependency(job_id: str) -> str:
    """Return the value of `sbatch --dependency` for the success of a job."""
    return f"afterok:{job_id}"


def find_rejection_reason(script: str) -> str | None:
    """Return Slurm's error for a batch script, or None if Slurm would accept it."""
    process = _run_command(["sbatch", "--test-only"], script)
    return None if process.returncode == 0 else _get_last_line(process.stderr)


def is_preempted(job_id: str) -> bool:
    """Return True if Slurm preempts a job in favour of another one."""
    # Slurm prints "PreemptEligibleTime=... PreemptTime=None" until a job is preempted
    fields = _run_checked("scontrol", "show", "job", job_id).split()
    times = [field for field in fields if field.startswith("PreemptTime=")]
    return bool(times) and times != ["PreemptTime=None"]


def requeue_job(job_id: str, excluded_nodes: Sequence[str]) -> None:
    """Requeue the job of this process, which ends its current attempt."""
    if not excluded_nodes:
        _run_checked("scontrol", "requeue", job_id)
        return
    # Slurm accepts excluded nodes of pending jobs only
    _run_checked("scontrol", "requeuehold", job_id)
    _run_checked("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(excluded_nodes)}")
    _run_checked("scontrol", "release", job_id)


def drain_node(node: str, reason: str) -> bool:
    """Drain a node; return False if the user lacks the permission."""
    args = ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"]
    return _run_command(args).returncode == 0


def _run_checked(*args: str) -> str:
    process = _run_command(list(args))
    if process.returncode != 0:
        raise ConfigError(f"{args[0]} {args[1]}: {_get_last_line(process.stderr)}")
    return process.stdout


def _run_command(args: list[str], stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(args, input=stdin, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{args[0]} is not on the PATH; run this command on a login node of Slurm"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{args[0]} has not answered for {_TIMEOUT_S} seconds") from error


def _get_last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it failed without a message"
