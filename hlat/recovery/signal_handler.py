"""Signal handlers within a context; one of them stops a run at the next step boundary."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

DUPLICATE_SIGNAL_WINDOW_S = 2.0
"""Slurm signals every process of a job, and the supervisor forwards its own signal as well: a
supervised process treats signals within this time as one."""
ABORT_AFTER_S = 5.0
"""Time after Ctrl-C for the current step, if no finished step would be lost without it. The current
operation of the step then ends first, so that the run ends within about 10 s."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""Ctrl-C and the signals of schedulers."""
_NOTICE_SIGNAL = signal.SIGUSR2
"""Signal before the time limit, which requests a save."""


@contextlib.contextmanager
def handle_signals(handler: Any, signals: Sequence[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Handle signals with `handler` within the context."""
    previous = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, previous_handler in previous.items():
            signal.signal(signum, previous_handler)


class SignalHandler:
    """Context manager that records the first signal and restores default handling for the second.

    Further signals are ignored for `duplicate_window_s` after the first, whose name is
    `signal_name`. After a Ctrl-C, KeyboardInterrupt is raised within 10 s if `can_abort` then
    returns True. After the context, SIGUSR2 has no effect, because nothing is left to save.
    """

    def __init__(
        self,
        print_message: bool = True,
        duplicate_window_s: float = 0.0,
        can_abort: Callable[[], bool] = lambda: False,
    ) -> None:
        self._print_message, self._duplicate_window_s = print_message, duplicate_window_s
        self._can_abort = can_abort
        self._received_time = -math.inf
        self.signal_name: str | None = None

    def __enter__(self) -> "SignalHandler":
        self._previous_handlers = {
            signum: signal.signal(signum, self._handle_signal) for signum in SIGNALS
        }
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._restore_handlers()
        if signal.getsignal(_NOTICE_SIGNAL) is signal.SIG_DFL:
            # It would kill the process before it reports a result that is already saved
            signal.signal(_NOTICE_SIGNAL, lambda signum, frame: None)

    def ignore_signals(self) -> None:
        """Ignore further signals until the context ends, after the final save."""
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() < self._received_time + self._duplicate_window_s:
            return
        if self.signal_name is not None or not self._duplicate_window_s:
            self._restore_handlers()
        if self.signal_name is not None:
            signal.raise_signal(signum)
            return
        self._received_time, self.signal_name = time.monotonic(), signal.Signals(signum).name
        if signum == signal.SIGINT and self._can_abort():
            signal.signal(signal.SIGALRM, self._abort)
            signal.setitimer(signal.ITIMER_REAL, ABORT_AFTER_S)
        if self._print_message:
            message = (
                f"\nhlat: {self.signal_name}: stopping after this step and a save (again: at once)"
            )
            # print is not safe in a handler, which may interrupt a print; stderr may be closed
            with contextlib.suppress(OSError):
                os.write(2, f"{message}\n".encode())

    def _abort(self, signum: int, frame: FrameType | None) -> None:
        if self._can_abort():
            raise KeyboardInterrupt

    def _restore_handlers(self) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
