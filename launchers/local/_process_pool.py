"""Concurrent processes of a sweep on this machine, within a resource budget.

Each process runs in a new session, so that it receives a signal once, forwarded by the pool.
"""

import contextlib
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hlat.config.config_errors import ExitCode
from hlat.config.entry_point import get_user_environment
from hlat.distributed.process_signals import DUMP_SIGNAL
from hlat.recovery.prepared_process import PreparedProcess
from hlat.recovery.signal_handler import handle_signals

from ._core_budget import ResourceBudget, ResourceRequest
from ._prepared_points import can_fork
from ._sweep_console import SweepConsole, SweepTask

_SIGINT_EXIT_CODE = 130
"""Exit code of a run that receives SIGINT before it can save a checkpoint."""
_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class RunningProcess:
    """A running point with its part of the budget; `start_time` is that of time.monotonic()."""

    task: SweepTask
    request: ResourceRequest
    device_ids: Sequence[str]
    process: "subprocess.Popen[bytes] | PreparedProcess"
    start_time: float


class ProcessPool:
    """Pool of processes that share a resource budget.

    Args:
        command: Command of each process, before the overrides of the point.
        environment: Environment variables in addition to those of the user.
        budget: Resources of all processes.
        console: Output of the progress.
        forks: True to fork processes with a log file from a prepared one.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        budget: ResourceBudget,
        console: SweepConsole,
        forks: bool = False,
    ) -> None:
        self._command, self._environment = command, environment
        self._budget, self._console, self._forks = budget, console, forks
        self._running: list[RunningProcess] = []
        self._exit_codes: dict[int, int] = {}
        self._is_preempted = False
        self._signals: list[int] = []

    def run(self, tasks: Sequence[tuple[SweepTask, ResourceRequest]]) -> dict[int, int]:
        """Run points in order, and return the exit codes of the started ones by number.

        After a signal, or after an interrupted point, no further point starts.
        """
        waiting, num_forwarded = deque(tasks), 0
        with (
            handle_signals(lambda signum, _: self._signals.append(signum)),
            handle_signals(lambda signum, _: self._send_signal(signum), [DUMP_SIGNAL]),
            self._terminate_on_error(),
        ):
            while self._running or (waiting and not self._is_stopping):
                for number in self._signals[num_forwarded:]:
                    num_forwarded += 1
                    self._send_signal(number)
                while waiting and not self._is_stopping and self._can_start(waiting[0][1]):
                    self._start(*waiting.popleft())
                self._console.print_progress([p.task for p in self._running], len(waiting))
                time.sleep(_POLL_INTERVAL_S)
                self._collect_finished()
        return self._exit_codes

    @contextlib.contextmanager
    def _terminate_on_error(self) -> Iterator[None]:
        """Terminate the running processes, which save their state, after an exception."""
        try:
            yield
        except BaseException:
            self._send_signal(signal.SIGTERM)
            for running in self._running:
                running.process.wait()
            raise

    def _send_signal(self, number: int) -> None:
        for running in self._running:
            running.process.send_signal(number)

    @property
    def _is_stopping(self) -> bool:
        return bool(self._signals) or self._is_preempted

    def _can_start(self, request: ResourceRequest) -> bool:
        return self._budget.can_start(request, [running.request for running in self._running])

    def _start(self, task: SweepTask, request: ResourceRequest) -> None:
        used = {name for running in self._running for name in running.device_ids}
        free = [name for name in self._budget.devices.device_ids if name not in used]
        device_ids = free[: request.num_devices]
        self._console.print_start(task)
        variables = {**get_user_environment(), **self._environment}
        variables |= self._budget.build_environment(request, device_ids)
        process = self._start_process(task, variables)
        self._running.append(RunningProcess(task, request, device_ids, process, time.monotonic()))

    def _start_process(
        self, task: SweepTask, variables: Mapping[str, str]
    ) -> "subprocess.Popen[bytes] | PreparedProcess":
        """Start the process of a point, forked if its configuration allows this."""
        command = [*self._command, *task.point.overrides]
        if self._forks and task.log is not None and can_fork(task.point.config):
            _, _, module, *arguments = command  # python -m MODULE
            return PreparedProcess(module, arguments, variables, task.log)
        with contextlib.ExitStack() as stack:
            output = None
            if task.log is not None:
                output = stack.enter_context(task.log.open("ab"))
                variables = {**variables, "PYTHONUNBUFFERED": "1"}  # writes log lines immediately
            return subprocess.Popen(
                command, env=variables, stdout=output, stderr=output, start_new_session=True
            )

    def _collect_finished(self) -> None:
        for running in [*self._running]:
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            if self._signals and code in (_SIGINT_EXIT_CODE, *(-n for n in self._signals)):
                code = ExitCode.PREEMPTED  # before the first checkpoint
            self._exit_codes[running.task.number] = code
            self._is_preempted |= code == ExitCode.PREEMPTED
            self._console.print_end(running.task, code, time.monotonic() - running.start_time)
