"""Runs points as processes of this machine: as many at once as the budget has room for, in order.

Each has a session of its own, so that a signal reaches it once, from here, and is told which
threads and devices are its own.
"""

import contextlib
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from hlat.config.entry import users_environment
from hlat.config.errors import Exit

from ._budget import Budget, Need
from ._console import Console, Task

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_INTERRUPTED = 130
"""Exit code of a run that Ctrl-C has reached before there was anything to save."""
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Running:
    """A point that runs.

    Attributes:
        task: What it is.
        need: What it takes of the budget.
        devices: Those that are its own.
        process: Its process.
        began: When, by the clock that counts since the machine was started.
    """

    task: Task
    need: Need
    devices: Sequence[str]
    process: "subprocess.Popen[bytes]"
    began: float


class Queue:
    """The points that run, and how those ended that did."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        budget: Budget,
        console: Console,
    ) -> None:
        """Run nothing yet.

        Args:
            command: What each process runs, before the point's overrides.
            variables: Set in each, beside those of the user.
            budget: What all that run share.
            console: Where it is told what becomes of them.
        """
        self._command, self._variables = command, variables
        self._budget, self._console = budget, console
        self._running: list[Running] = []
        self._codes: dict[int, int] = {}
        self._signals: list[int] = []

    def run(self, tasks: Sequence[tuple[Task, Need]]) -> dict[int, int]:
        """Run points, and return the exit codes by number of those that were started.

        None is started any more after a signal, or after a point that was interrupted.
        """
        waiting, passed_on = deque(tasks), 0
        with _noting(self._signals), self._none_left_behind():
            while self._running or (waiting and not self._ending):
                for number in self._signals[passed_on:]:
                    passed_on += 1
                    self._send(number)
                while waiting and not self._ending and self._has_room(waiting[0][1]):
                    self._start(*waiting.popleft())
                self._console.progress([one.task for one in self._running], len(waiting))
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                self._look()
        return self._codes

    @contextlib.contextmanager
    def _none_left_behind(self) -> Iterator[None]:
        """Have what runs save and end if this cannot go on: nobody would look after it."""
        try:
            yield
        except BaseException:
            self._send(signal.SIGTERM)
            for one in self._running:
                one.process.wait()
            raise

    def _send(self, number: int) -> None:
        for one in self._running:
            one.process.send_signal(number)

    @property
    def _ending(self) -> bool:
        return bool(self._signals) or Exit.PREEMPTED in self._codes.values()

    def _has_room(self, need: Need) -> bool:
        return self._budget.has_room(need, [one.need for one in self._running])

    def _start(self, task: Task, need: Need) -> None:
        taken = {name for one in self._running for name in one.devices}
        free = [name for name in self._budget.devices.names if name not in taken]
        devices = free[: need.devices]
        self._console.starts(task)
        variables = {**users_environment(), **self._variables}
        variables |= self._budget.variables(need, devices)
        with contextlib.ExitStack() as stack:
            output = None
            if task.log is not None:
                output = stack.enter_context(task.log.open("ab"))
                variables["PYTHONUNBUFFERED"] = "1"  # or it would lag behind what it tells of
            process = subprocess.Popen(
                [*self._command, *task.point.overrides],
                env=variables,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._running.append(Running(task, need, devices, process, time.monotonic()))

    def _look(self) -> None:
        """Take leave of those that have ended."""
        for one in [*self._running]:
            code = one.process.poll()
            if code is None:
                continue
            self._running.remove(one)
            if self._signals and code in (_INTERRUPTED, *(-number for number in self._signals)):
                code = Exit.PREEMPTED  # it was too young to save anything
            self._codes[one.task.number] = code
            self._console.ends(one.task, code, time.monotonic() - one.began)


@contextlib.contextmanager
def _noting(arrived: list[int]) -> Iterator[None]:
    """Write down the signals that arrive, rather than be ended by them."""

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
