"""One attempt of a Slurm job, on its first node: runs the commands on all nodes, and requeues.

    python <code archive> hlat.jobs.attempt <submission>

`<submission>` is the submission directory, or the link to it in the directory of a job array. The
attempt forwards stop signals to the run, reads how the run ended, and requeues the job if the exit
code requires it (hlat.config.config_errors.ExitCode). It does not import torch.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.distributed import process_signals, rank_environment
from hlat.jobs import slurm_commands
from hlat.jobs.held_jobs import HeldJobs
from hlat.jobs.submission import SubmissionDir, find_latest_submission, load_all_scores
from hlat.recovery import host_info
from hlat.tracking import lost_work, sweep_log
from hlat.tracking.jsonl_log import open_events_log, open_metrics_log

_STOP_TIMEOUT_FRACTION = 0.8
"""Part of the time between Slurm's signal and the time limit after which a run that has not stopped
is requeued, since a job that reaches its time limit is not."""
_FINAL_EXIT_CODES = (ExitCode.FINISHED, ExitCode.CONFIGURATION, ExitCode.DIVERGED)
_NOT_FAILED = (*_FINAL_EXIT_CODES, ExitCode.PREEMPTED, ExitCode.UNHEALTHY_NODE)
_REPORT_TIMEOUT_S = 900
"""Limit of the time to write the report of a sweep, while the nodes of the job are allocated."""


@dataclass(frozen=True)
class AttemptResult:
    """Result of an attempt, which decides on a restart.

    `step` is the last logged step, or the number of scores; `stop_requested` is True if the attempt
    ended because of its time limit or a preemption, not because of a cancellation. `has_progressed`
    is False if the attempt added no step and was not preempted.
    """

    exit_code: int
    step: int
    stop_requested: bool
    unhealthy_nodes: tuple[str, ...] = ()
    progress_unit: str = "step"
    has_progressed: bool = True


class _StopTimeoutError(Exception):
    """The commands have not ended long enough before the time limit."""


def find_restart_reason(
    result: AttemptResult, failed_steps: list[int], attempts_left: int, has_progressed_before: bool
) -> str | None:
    """Return the reason for another attempt, or None if the job is not restarted.

    `failed_steps` contains the last step of each earlier attempt that failed;
    `has_progressed_before` is False if the previous attempt made no progress.
    """
    if result.exit_code in _FINAL_EXIT_CODES or attempts_left <= 0:
        return None
    if result.exit_code == ExitCode.PREEMPTED:
        may_restart = result.stop_requested and (result.has_progressed or has_progressed_before)
        return "it was stopped to save its state" if may_restart else None
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
        self._job_id = slurm_commands.get_job_id(environment)
        self._attempt_number = int(environment.get("SLURM_RESTART_COUNT", 0)) + 1
        self._stop_file = submission_dir.path / f"stop.{self._job_id}.{self._attempt_number}"
        self._start_time, self._first_step = time.time(), self._load_progress()
        self._terminated_by_slurm = self._stop_announced = False

    def run(self) -> int:
        """Run the commands on all nodes, requeue the job if needed, and return the exit code."""
        self._stop_file.unlink(missing_ok=True)
        nodes = self._environment["SLURM_JOB_NODELIST"]
        self._log_event("start", nodes=nodes)
        print(f"hlat: job {self._job_id}, attempt {self._attempt_number} on {nodes}", flush=True)
        # Slurm copies the soft limit from the login node
        host_info.raise_open_file_limit(self._submission.open_files)
        for signum in process_signals.STOP_SIGNALS:
            signal.signal(signum, self._request_stop)
        signal.signal(signal.SIGUSR2, self._handle_announcement)
        signal.signal(signal.SIGALRM, _raise_stop_timeout)
        signal.signal(signal.SIGTERM, self._record_termination)
        signal.signal(process_signals.DUMP_SIGNAL, _do_nothing)
        held_jobs = HeldJobs(self._submission_dir.run_dir)
        if self._submission.trains:
            held_jobs.start_polling()
        result = self._build_result(self._run_commands())
        reason = self._find_restart_reason(result)
        self._log_event(
            "end",
            exit=result.exit_code,
            step=result.step,
            progress=result.has_progressed,
            cancelled=self._is_cancelled(result),
            again=reason,
        )
        if reason is not None:
            self._requeue(result, reason)
        elif self._submission.trains:
            held_jobs.release_ready()
            self._write_sweep_report()
        return result.exit_code

    def _write_sweep_report(self) -> None:
        if self._submission.sweep is not None and not self._terminated_by_slurm:
            for signum in {*process_signals.STOP_SIGNALS} - {signal.SIGTERM}:
                signal.signal(signum, signal.SIG_IGN)
            program = self._submission.commands[0][:2]
            write_report_if_last(program, Path(self._submission.sweep))

    def _run_commands(self) -> int:
        """Run the commands in order on all nodes; return the first exit code other than 0."""
        for command in self._submission.commands:
            args = slurm_commands.build_srun_command(
                command, self._submission.nodes, self._submission.options, self._environment
            )
            process = subprocess.Popen(args, env=self._build_environment())
            try:
                exit_code = process.wait()
            except _StopTimeoutError:
                print(f"hlat: job {self._job_id} has not stopped before its time limit", flush=True)
                process.kill()
                process.wait()
                return ExitCode.FAILED
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if exit_code:
                return exit_code
        return ExitCode.FINISHED

    def _build_environment(self) -> dict[str, str]:
        port = rank_environment.compute_rendezvous_port(self._environment)
        host = rank_environment.parse_first_host(self._environment["SLURM_JOB_NODELIST"])
        return {
            **self._environment,
            **self._submission.environment,
            rank_environment.NUM_NODES_ENV: str(self._submission.nodes),
            rank_environment.RDZV_ENDPOINT_ENV: f"{host}:{port}",
            rank_environment.STOP_FILE_ENV: str(self._stop_file),
        }

    def _build_result(self, exit_code: int) -> AttemptResult:
        """Return the result; srun returns 0 also for tasks that a signal has ended."""
        step, is_finished = self._load_progress(), not self._terminated_by_slurm
        hosts: tuple[str, ...] = ()
        if self._submission.trains:
            events = open_events_log(self._submission_dir.run_dir).read_rows()
            is_finished = lost_work.is_finished(events)
            new_events = [row for row in events if row["time"] >= self._start_time]
            excluded = [row for row in new_events if row["event"] == "exclude"]
            hosts = tuple(dict.fromkeys(str(row["host"]) for row in excluded))
        if exit_code == ExitCode.FINISHED and not is_finished:
            no_event = "the last attempt in events.jsonl has no finish event"
            reason = no_event if self._submission.trains else "Slurm has terminated the job"
            print(f"hlat: the attempt has failed: srun returned 0, but {reason}", flush=True)
            exit_code = ExitCode.FAILED
        if exit_code not in [*ExitCode]:
            exit_code = ExitCode.FAILED
        is_resumable = self._submission.trains or self._submission.scores is not None
        preempted = (
            is_resumable
            and exit_code == ExitCode.PREEMPTED
            and slurm_commands.is_preempted(self._job_id)
        )
        return AttemptResult(
            int(exit_code),
            step,
            preempted or (is_resumable and self._stop_announced),
            hosts,
            "step" if self._submission.scores is None else "score",
            preempted or step > self._first_step,
        )

    def _load_progress(self) -> int:
        """Return the last logged step, or the number of scores."""
        if self._submission.scores is not None:
            scores = load_all_scores(Path(self._submission.scores))
            return sum(len(row["tasks"]) for row in scores)
        rows = open_metrics_log(self._submission_dir.run_dir).read_rows()
        return int(rows[-1]["step"]) if rows else 0

    def _is_cancelled(self, result: AttemptResult) -> bool:
        return self._terminated_by_slurm and not result.stop_requested

    def _find_restart_reason(self, result: AttemptResult) -> str | None:
        if self._is_cancelled(result):
            return None
        rows = self._submission_dir.attempts.read_rows()
        ends = [row for row in rows if row["event"] == "end" and row["job"] == self._job_id]
        failed_steps = [row["step"] for row in ends if row["exit"] not in _NOT_FAILED]
        progress = [row["progress"] for row in ends if row["exit"] != ExitCode.UNHEALTHY_NODE]
        has_progressed_before = all(progress[-1:])
        attempts_left = self._submission.max_attempts - self._attempt_number
        reason = find_restart_reason(result, failed_steps, attempts_left, has_progressed_before)
        is_stalled = not (result.has_progressed or has_progressed_before)
        if result.exit_code == ExitCode.PREEMPTED and is_stalled:
            print(
                f"hlat: job {self._job_id} is not restarted: two attempts in a row made no "
                f"progress, the last at {result.progress_unit} {result.step}",
                flush=True,
            )
        return reason

    def _requeue(self, result: AttemptResult, reason: str) -> None:
        # Slurm ends a requeued job by SIGTERM; scontrol inherits that it is ignored
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
        try:
            slurm_commands.requeue_job(self._job_id, excluded)
        except ConfigError as error:
            self._log_event("requeue_failed", reason=str(error))
            raise

    def _log_event(self, event: str, **fields: object) -> None:
        attempt = {"job": self._job_id, "attempt": self._attempt_number}
        self._submission_dir.attempts.append(
            {"event": event, **attempt, "time": time.time(), **fields}
        )

    def _request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Create the stop file, which the supervisors of the run poll."""
        self._stop_file.touch()

    def _handle_announcement(self, signum: int, frame: FrameType | None) -> None:
        """Stop the run and start the timeout, as Slurm has announced the time limit."""
        self._stop_announced = True
        self._request_stop(signum, frame)
        timeout_s = _STOP_TIMEOUT_FRACTION * self._submission.signal_s
        signal.setitimer(signal.ITIMER_REAL, timeout_s)

    def _record_termination(self, signum: int, frame: FrameType | None) -> None:
        self._terminated_by_slurm = True


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Ignore a signal in this process only; `signal.SIG_IGN` would also apply to srun."""


def _raise_stop_timeout(signum: int, frame: FrameType | None) -> None:
    raise _StopTimeoutError


def main(argv: list[str]) -> int:
    """Run an attempt of the submission in a directory, and return the exit code."""
    path = Path(argv[0])
    submission_dir = SubmissionDir(path.readlink() if path.is_symlink() else path)
    try:
        return JobAttempt(submission_dir, os.environ).run()
    except ConfigError as error:
        print(f"hlat: {error}", file=sys.stderr)
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def write_report_if_last(program: Sequence[str], sweep_dir: Path) -> None:
    """Write the comparison if all jobs of the sweep have ended.

    Each job logs its end before it reads whether the others have ended, so the last one finds all
    of them ended, without a lock. Two jobs that end at the same time may both write the same files.

    Args:
        program: Command that runs a module.
        sweep_dir: Directory of the sweep.
    """
    if not has_ended(sweep_dir):
        return
    print(f"hlat: all jobs of {sweep_dir} have ended", flush=True)
    command = [*program, "hlat.report", str(sweep_dir)]
    try:
        subprocess.run(command, timeout=_REPORT_TIMEOUT_S, check=True)
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
