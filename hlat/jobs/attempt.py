"""One attempt of a Slurm job, on its first node: runs the commands on all nodes, and requeues.

    python <submission>/code hlat.jobs.attempt <submission>

The attempt forwards Slurm's early signal to the run, reads how the run ended, and requeues the job
if the exit code requires it (hlat.config.config_errors.ExitCode). It does not import torch.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hlat import launch_environment
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.jobs import slurm_commands
from hlat.jobs.evaluation_job import load_all_scores
from hlat.jobs.submission import Submission, SubmissionDir
from hlat.recovery import host_info
from hlat.tracking.jsonl_log import JsonlLog

_REQUEUE_TIMEOUT_S = 120
"""Time for Slurm to end this process after the job was requeued."""
_FINAL_EXIT_CODES = (ExitCode.FINISHED, ExitCode.CONFIGURATION, ExitCode.DIVERGED)
_NOT_FAILED = (*_FINAL_EXIT_CODES, ExitCode.PREEMPTED, ExitCode.UNHEALTHY_NODE)


@dataclass(frozen=True)
class AttemptResult:
    """Result of an attempt, which decides on a restart.

    `step` is the last logged step, or the number of scores; `stop_requested` is True if the attempt
    ended because of its time limit or a preemption, not because of a cancellation.
    """

    exit_code: int
    step: int
    stop_requested: bool
    unhealthy_nodes: tuple[str, ...] = ()
    progress_unit: str = "step"


def find_restart_reason(
    result: AttemptResult, failed_steps: list[int], attempts_left: int
) -> str | None:
    """Return the reason for another attempt, or None if the job is not restarted.

    `failed_steps` contains the last step of each earlier attempt that failed.
    """
    if result.exit_code in _FINAL_EXIT_CODES or attempts_left <= 0:
        return None
    if result.exit_code == ExitCode.PREEMPTED:
        return "it was stopped to save its state" if result.stop_requested else None
    if result.exit_code == ExitCode.UNHEALTHY_NODE and result.unhealthy_nodes:
        return f"unhealthy: {', '.join(result.unhealthy_nodes)}"
    if failed_steps and result.step <= failed_steps[-1]:
        return None
    return f"it failed at {result.progress_unit} {result.step}"


class JobAttempt:
    """One attempt of a job, with the environment variables of Slurm."""

    def __init__(self, submission_dir: SubmissionDir, environment: Mapping[str, str]) -> None:
        self._submission_dir, self._submission = submission_dir, submission_dir.load()
        self._environment = environment
        self._job_id = environment["SLURM_JOB_ID"]
        self._attempt_number = int(environment.get("SLURM_RESTART_COUNT", 0)) + 1
        self._stop_file = submission_dir.path / f"stop.{self._job_id}.{self._attempt_number}"
        self._start_time = time.time()
        self._terminated_by_slurm = False

    def run(self) -> int:
        """Run the commands on all nodes, requeue the job if needed, and return the exit code."""
        self._stop_file.unlink(missing_ok=True)
        nodes = self._environment["SLURM_JOB_NODELIST"]
        self._log_event("start", nodes=nodes)
        print(f"hlat: job {self._job_id}, attempt {self._attempt_number} on {nodes}", flush=True)
        # Slurm copies the soft limit from the login node
        host_info.raise_open_file_limit(self._submission.open_files)
        signal.signal(signal.SIGUSR2, self._request_stop)
        signal.signal(signal.SIGTERM, self._record_termination)
        result = self._build_result(self._run_commands())
        reason = self._find_restart_reason(result)
        self._log_event("end", exit=result.exit_code, step=result.step, again=reason)
        if reason is not None:
            self._requeue(result, reason)
        return result.exit_code

    def _run_commands(self) -> int:
        """Run the commands in order on all nodes; return the first exit code other than 0."""
        for command in self._submission.commands:
            args = build_srun_command(self._submission, command, self._environment)
            if exit_code := subprocess.Popen(args, env=self._build_environment()).wait():
                return exit_code
        return ExitCode.FINISHED

    def _build_environment(self) -> dict[str, str]:
        port = 20000 + int(self._job_id) % 10000  # below Linux's range of ephemeral ports
        host = launch_environment.parse_first_host(self._environment["SLURM_JOB_NODELIST"])
        return {
            **self._environment,
            **self._submission.environment,
            launch_environment.NUM_NODES_ENV: str(self._submission.nodes),
            launch_environment.RDZV_ENDPOINT_ENV: f"{host}:{port}",
            launch_environment.STOP_FILE_ENV: str(self._stop_file),
        }

    def _build_result(self, exit_code: int) -> AttemptResult:
        """Return the result; srun returns 0 also for tasks that a signal has ended."""
        step, unit, hosts = 0, "step", dict[str, None]()
        is_finished = not self._terminated_by_slurm
        if self._submission.trains:
            events = JsonlLog(self._submission_dir.run_dir / "events.jsonl").read_rows()
            is_finished = any(row["event"] == "finish" for row in events)
            new_events = [row for row in events if row["time"] >= self._start_time]
            excluded = [row for row in new_events if row["event"] == "exclude"]
            hosts = dict.fromkeys(str(row["host"]) for row in excluded)
            rows = JsonlLog(self._submission_dir.run_dir / "metrics.jsonl").read_rows()
            step = int(rows[-1]["step"]) if rows else 0
        elif self._submission.scores is not None:
            scores = load_all_scores(Path(self._submission.scores))
            step, unit = sum(len(row["tasks"]) for row in scores), "score"
        if exit_code not in [*ExitCode] or (exit_code == ExitCode.FINISHED and not is_finished):
            exit_code = ExitCode.FAILED
        stop_requested = (self._submission.trains or self._submission.scores is not None) and (
            self._stop_file.exists()
            or (exit_code == ExitCode.PREEMPTED and slurm_commands.is_preempted(self._job_id))
        )
        return AttemptResult(int(exit_code), step, stop_requested, tuple(hosts), unit)

    def _find_restart_reason(self, result: AttemptResult) -> str | None:
        if self._terminated_by_slurm and not result.stop_requested:
            return None
        rows = self._submission_dir.attempts.read_rows()
        ends = [row for row in rows if row["event"] == "end" and row["job"] == self._job_id]
        failed_steps = [row["step"] for row in ends if row["exit"] not in _NOT_FAILED]
        attempts_left = self._submission.max_attempts - self._attempt_number
        return find_restart_reason(result, failed_steps, attempts_left)

    def _requeue(self, result: AttemptResult, reason: str) -> None:
        print(f"hlat: job {self._job_id} is restarted: {reason}", flush=True)
        excluded = [
            node
            for node in result.unhealthy_nodes
            if not slurm_commands.drain_node(node, "hlat: unhealthy")
        ]
        for row in self._submission_dir.attempts.read_rows():
            excluded += [node for node in row.get("without", []) if node not in excluded]
        if excluded:
            self._log_event("exclude", without=excluded)
        slurm_commands.requeue_job(self._job_id, excluded)
        time.sleep(_REQUEUE_TIMEOUT_S)

    def _log_event(self, event: str, **fields: object) -> None:
        attempt = {"job": self._job_id, "attempt": self._attempt_number}
        self._submission_dir.attempts.append(
            {"event": event, **attempt, "time": time.time(), **fields}
        )

    def _request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Create the stop file, which the supervisors of the run poll."""
        self._stop_file.touch()

    def _record_termination(self, signum: int, frame: FrameType | None) -> None:
        self._terminated_by_slurm = True


def build_srun_command(
    submission: Submission, command: list[str], environment: Mapping[str, str]
) -> list[str]:
    """Return the command that runs `command` once per node with all of the node's CPUs.

    A failed task does not end the others, since supervisors agree on an exit code. srun waits one
    minute for a node without an answer.
    """
    cpus = environment.get("SLURM_CPUS_ON_NODE", "1")
    tasks = [f"--nodes={submission.nodes}", f"--ntasks={submission.nodes}", "--ntasks-per-node=1"]
    binding = [f"--cpus-per-task={cpus}", "--cpu-bind=none", "--export=ALL"]
    ending = ["--kill-on-bad-exit=0", "--wait=60"]
    return ["srun", *tasks, *binding, *ending, *submission.options, *command]


def main(argv: list[str]) -> int:
    """Run an attempt of the submission in a directory, and return the exit code."""
    try:
        return JobAttempt(SubmissionDir(Path(argv[0])), os.environ).run()
    except ConfigError as error:
        print(f"hlat: {error}", file=sys.stderr)
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
