"""The commands of Slurm: arguments, execution without a shell, and parsers of their output.

One section per command: squeue, scancel, sbatch, scontrol and srun. Functions raise ConfigError if
a command is missing, fails or does not answer. submitit only writes the lines of a batch script
(launchers/slurm/_sbatch_script.py).
"""

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.config.untrusted_files import format_value

ARRAY_TASK_ENV = "SLURM_ARRAY_TASK_ID"
"""Environment variable with the index of a task in its job array."""
PENDING_STATES = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"}
ACTIVE_STATES = {*PENDING_STATES, "RUNNING", "COMPLETING", "SUSPENDED"}
"""States of jobs that run or may run."""
NEVER_SATISFIED, HELD_BY_USER = "DependencyNeverSatisfied", "JobHeldUser"
"""Reasons of pending jobs: after a failed one, and until its user releases it."""
_SQUEUE_FORMAT = "%i|%T|%N|%r"
"""Job id, state, nodes and reason."""
_TIMEOUT_S = 60
_RETRY_S, _MAX_RETRY_INTERVAL_S = 600, 30
"""Time for which a job repeats a command, and the longest interval: slurmctld may restart."""


class UnknownJobError(ConfigError):
    """sbatch may have accepted a job, but printed no job id."""


class _NoAnswerError(ConfigError):
    """A command did not end before its time limit."""


@dataclass(frozen=True)
class JobState:
    """State of a job in squeue: state, abbreviated node list, and reason of a pending state."""

    name: str
    nodes: str
    reason: str


def get_job_id(environment: Mapping[str, str]) -> str:
    """Return the id of the job of this process: `7`, or `7_2` for task 2 of a job array.

    SLURM_JOB_ID of one task is the id of the array, which in a command means all tasks.
    """
    if ARRAY_TASK_ENV in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment[ARRAY_TASK_ENV]}"
    return environment["SLURM_JOB_ID"]


# squeue


def query_job_states(job_ids: Sequence[str], retry: bool = False) -> dict[str, JobState]:
    """Return the states of jobs; Slurm deletes jobs a few minutes after their end.

    With `retry`, wait some minutes for a slurmctld that is unavailable.
    """
    if not job_ids:
        return {}
    run = _run_with_retries if retry else _run_checked
    # squeue with job ids fails for all of them if one is unknown
    options = ["--states=all", "--array", f"--format={_SQUEUE_FORMAT}", "--me"]
    output = run("squeue", "--noheader", *options)
    rows = [line.strip().split("|", 3) for line in output.splitlines()]
    known = set(job_ids)
    for row in rows:
        if row[0] in known and len(row) != 4:
            raise ConfigError(
                f"squeue printed {format_value('|'.join(row))} in place of job, state, nodes and "
                "reason; run squeue --me, and repeat the command when it lists the jobs"
            )
    return {row[0]: JobState(*row[1:]) for row in rows if row[0] in known}


# scancel


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """Cancel jobs; raise ConfigError if scancel fails."""
    _run_checked("scancel", *job_ids)


# sbatch


def submit_script(script: Path, dependency: str | None = None, array: str | None = None) -> str:
    """Submit a batch script and return the job id.

    `dependency` and `array`, the tasks, replace those of the script.

    Raises:
        UnknownJobError: The job may exist; it must not be submitted again.
        ConfigError: Slurm rejects the job, or sbatch cannot be started.
    """
    options = [] if dependency is None else [f"--dependency={dependency}"]
    options += [] if array is None else [f"--array={array}"]
    advice = f"look for the job of {script} with squeue --me before you submit it again"
    try:
        process = _run_command(["sbatch", "--parsable", *options, str(script)])
    except _NoAnswerError as error:
        raise UnknownJobError(f"{error}; {advice}") from error
    if process.returncode != 0:
        raise ConfigError(f"sbatch rejects {script}: {_get_last_line(process.stderr)}")
    answer = process.stdout.strip()
    job_id = answer.partition(";")[0]
    if not re.fullmatch(r"\d+", job_id, re.ASCII):
        raise UnknownJobError(
            f"sbatch printed {format_value(answer)} in place of a job id; {advice}"
        )
    return job_id


def format_dependency(job_id: str, is_array: bool = False) -> str:
    """Return the value of `sbatch --dependency` for the success of a job, or of equal tasks."""
    return f"{'aftercorr' if is_array else 'afterok'}:{job_id}"


def format_array(tasks: Sequence[int], limit: int | None = None) -> str:
    """Return the value of `sbatch --array` for sorted tasks: 0-3,7 or, with a limit, 0-3,7%2."""
    ranges: list[list[int]] = []
    for task in tasks:
        if ranges and ranges[-1][1] == task - 1:
            ranges[-1][1] = task
        else:
            ranges.append([task, task])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return text if limit is None else f"{text}%{limit}"


def parse_array_limit(script: str) -> int | None:
    """Return the maximum number of concurrent tasks in a batch script; None: no limit."""
    match = re.search(r"^#SBATCH --array=[\d,-]+%(\d+)", script, re.MULTILINE)
    return None if match is None else int(match[1])


def find_rejection_reason(script: str) -> str | None:
    """Return Slurm's error for a batch script, or None if Slurm would accept it."""
    process = _run_command(["sbatch", "--test-only"], script)
    return None if process.returncode == 0 else _get_last_line(process.stderr)


# scontrol


def release_job(job_id: str) -> None:
    """Release a job that its user has held; raise ConfigError if it does not exist."""
    _run_checked("scontrol", "release", job_id)


def is_preempted(job_id: str) -> bool:
    """Return True if Slurm preempts a job in favour of another one."""
    # Slurm prints "PreemptEligibleTime=... PreemptTime=None" until a job is preempted
    fields = _run_with_retries("scontrol", "show", "job", job_id).split()
    times = [field for field in fields if field.startswith("PreemptTime=")]
    return bool(times) and times != ["PreemptTime=None"]


def requeue_job(job_id: str, excluded_nodes: Sequence[str]) -> None:
    """Requeue the job of this process, which must end afterwards."""
    _run_with_retries("scontrol", "requeue", job_id)
    if excluded_nodes:
        # Slurm accepts excluded nodes of pending jobs only, and this job waits for this process
        nodes = ",".join(excluded_nodes)
        _run_with_retries("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}")


def drain_node(node: str, reason: str) -> bool:
    """Drain a node; return False if the user lacks the permission, or Slurm does not answer."""
    args = ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"]
    with suppress(ConfigError):
        return _run_command(args).returncode == 0
    return False


# srun


def build_srun_command(
    command: Sequence[str], num_nodes: int, options: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Return the command that runs `command` once per node with all of the node's CPUs.

    A failed task does not end the others, since supervisors agree on an exit code. srun waits one
    minute for a node without an answer.
    """
    cpus = environment.get("SLURM_CPUS_ON_NODE", "1")
    tasks = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    binding = [f"--cpus-per-task={cpus}", "--cpu-bind=none", "--export=ALL"]
    ending = ["--kill-on-bad-exit=0", "--wait=60"]
    return ["srun", *tasks, *binding, *ending, *options, *command]


# execution


def _run_checked(*args: str) -> str:
    process = _run_command(list(args))
    if process.returncode != 0:
        raise ConfigError(f"{args[0]} {args[1]}: {_get_last_line(process.stderr)}")
    return process.stdout


def _run_with_retries(*args: str) -> str:
    """Repeat a command with growing intervals until it succeeds or `_RETRY_S` has passed."""
    deadline, interval_s = time.monotonic() + _RETRY_S, 1
    while True:
        try:
            return _run_checked(*args)
        except ConfigError as error:
            if time.monotonic() > deadline:
                raise
            print(f"hlat: {error}; trying again in {interval_s} s", file=sys.stderr)
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, _MAX_RETRY_INTERVAL_S)


def _run_command(args: list[str], stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            args, input=stdin, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"{args[0]} is not on the PATH; run this command on a login node of Slurm"
        ) from error
    except OSError as error:
        raise ConfigError(f"{args[0]} cannot be started ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise _NoAnswerError(f"{args[0]} has not answered for {_TIMEOUT_S} seconds") from error


def _get_last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith('Try "')]  # after an unknown option
    return lines[-1] if lines else "it failed without a message"
