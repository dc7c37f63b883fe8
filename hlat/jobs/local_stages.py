"""Stages of a campaign as processes of this machine, one after the other.

A stage runs in a new session, so that it receives a signal once, forwarded by this process. It
saves its state and exits with code 75, and the same command continues with it.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from hlat.config.config_errors import ExitCode, raise_config_errors
from hlat.config.entry_point import build_module_command, get_user_environment
from hlat.distributed.process_signals import DUMP_SIGNAL
from hlat.jobs.campaign_state import LOCAL, CampaignLog, StageState, StageStatus
from hlat.jobs.stage_job import StageJob
from hlat.recovery.signal_handler import handle_signals

_SIGINT_EXIT_CODE = 130


def validate_no_submitted(jobs: Sequence[StageJob], statuses: Mapping[str, StageStatus]) -> None:
    """Raise ConfigError if a scheduler has one of the jobs."""
    active = (StageState.submitted, StageState.running)
    problems = [
        f"{job.name} is {statuses[job.name].state.value} as job {statuses[job.name].job_id}; wait "
        f"for it, or cancel it: hlat jobs cancel {job.directory}"
        for job in jobs
        if statuses[job.name].state in active
    ]
    raise_config_errors(problems)


class LocalStages:
    """Runner of the jobs of a campaign."""

    def __init__(self, log: CampaignLog) -> None:
        self._log = log
        self._signals: list[int] = []
        self._training: subprocess.Popen[bytes] | None = None

    def run(self, jobs: Sequence[StageJob], statuses: dict[str, StageStatus]) -> int:
        """Run the unfinished jobs in order; return the first failure's exit code.

        A job is skipped if one of its dependencies has failed. After an interrupted job, none
        starts.
        """
        unfinished: set[str] = set()
        first_code = 0
        with (
            handle_signals(lambda signum, _: self._signals.append(signum)),
            handle_signals(self._request_stacks, [DUMP_SIGNAL]),
        ):
            for job in jobs:
                if statuses[job.name].state is StageState.finished:
                    continue
                code = None if unfinished.intersection(job.after) else self._run_job(job)
                if code != ExitCode.FINISHED:
                    unfinished.add(job.name)
                first_code = first_code or code or 0
                if self._signals or code == ExitCode.PREEMPTED:
                    return ExitCode.PREEMPTED
        return first_code

    def _run_job(self, job: StageJob) -> int:
        print(f"==> {job.name}: hlat {job.kind} {' '.join(job.arguments)}", flush=True)
        self._log.append("start", job.name, digest=job.digest, launcher=LOCAL)
        command = [*build_module_command(sys.executable, job.module), *job.arguments]
        process = subprocess.Popen(command, env=get_user_environment(), start_new_session=True)
        self._training = process if job.module == "hlat.train" else None
        code = self._wait(process)
        if self._signals and code in (_SIGINT_EXIT_CODE, *(-number for number in self._signals)):
            code = ExitCode.PREEMPTED  # before the first checkpoint
        self._log.append("end", job.name, exit=int(code))
        return code

    def _request_stacks(self, signum: int, frame: FrameType | None) -> None:
        """Forward `DUMP_SIGNAL` to a training process; it would end another command."""
        if self._training is not None:
            self._training.send_signal(signum)

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        """Return the exit code of a process, to which signals are forwarded."""
        num_forwarded = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.1)
            for number in self._signals[num_forwarded:]:
                num_forwarded += 1
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.Signals(number))
