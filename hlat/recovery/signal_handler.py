"""Signal handlers within a context.

SIGTERM, SIGINT and the signals of schedulers before preemption stop a run at the next step
boundary, where it saves its state.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from hlat.config.config_errors import ExitCode
from hlat.distributed import process_signals, rank_environment
from hlat.distributed.exit_record import SetupStoppedError
from hlat.distributed.process_signals import STOP_SIGNALS

DUPLICATE_SIGNAL_WINDOW_S = 2.0
"""Slurm signals every process of a job, and the supervisor forwards its own signal as well: a
supervised process treats signals within this time as one."""
ABORT_AFTER_S = 5.0
"""Time after Ctrl-C for the current step, if no finished step would be lost without it. The current
operation of the step then ends first, so that the run ends within about 10 s."""


@contextlib.contextmanager
def handle_signals(
    handler: Any, signals: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[None]:
    """Handle signals with `handler` within the context."""
    previous = _set_handlers(handler, signals)
    try:
        yield
    finally:
        for signum, previous_handler in previous.items():
            signal.signal(signum, previous_handler)


@contextlib.contextmanager
def handle_process_signals() -> Iterator[None]:
    """Exit with code 75 after a stop signal that no `SignalHandler` within the context handles.

    `DUMP_SIGNAL` writes stacks. The process must end after the context, which restores no handler
    and ignores stop signals, since its result is known.
    """
    process_signals.register_stack_dumps()
    _set_handlers(_stop_setup)
    try:
        yield
    except SetupStoppedError as error:
        if rank_environment.read_rank_info().is_rank0:
            print(
                f"\nhlat: {error} before training; no step is lost. Repeat the command",
                file=sys.stderr,
            )
        sys.exit(ExitCode.PREEMPTED)
    finally:
        _set_handlers(signal.SIG_IGN)  # unlike other handlers, valid until the interpreter ends


class SignalHandler:
    """Context manager that records the first stop signal.

    Further signals are ignored, as a scheduler may announce the end of a job several times and in
    different ways. Only a second Ctrl-C raises KeyboardInterrupt, unless it arrives within
    `duplicate_window_s` after the first signal, whose name is `signal_name`. After the first
    Ctrl-C, KeyboardInterrupt is raised within 10 s if `can_abort` then returns True.

    After the context, stop signals have no effect in a process within
    `handle_process_signals`, because nothing is left to save.
    """

    def __init__(
        self,
        print_message: bool = True,
        duplicate_window_s: float = 0.0,
        can_abort: Callable[[], bool] = lambda: False,
    ) -> None:
        self._print_message, self._duplicate_window_s = print_message, duplicate_window_s
        self._can_abort = can_abort
        self._received_time, self._num_interrupts = -math.inf, 0
        self.signal_name: str | None = None

    def __enter__(self) -> "SignalHandler":
        self._previous_handlers = _set_handlers(self._handle_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, previous_handler in self._previous_handlers.items():
            signal.signal(
                signum, _do_nothing if previous_handler is _stop_setup else previous_handler
            )

    def ignore_signals(self) -> None:
        """Ignore further signals until the context ends, after the final save."""
        _set_handlers(_do_nothing)

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() < self._received_time + self._duplicate_window_s:
            return
        self._num_interrupts += signum == signal.SIGINT
        if self._num_interrupts > 1:
            raise KeyboardInterrupt
        if self.signal_name is not None:
            return
        self._received_time, self.signal_name = time.monotonic(), signal.Signals(signum).name
        if signum == signal.SIGINT and self._can_abort():
            signal.signal(signal.SIGALRM, self._abort)
            signal.setitimer(signal.ITIMER_REAL, ABORT_AFTER_S)
        if self._print_message:
            again = " (again: at once)" if signum == signal.SIGINT else ""
            message = f"\nhlat: {self.signal_name}: stopping after this step and a save{again}\n"
            # print is not safe in a handler, which may interrupt a print; stderr may be closed
            with contextlib.suppress(OSError):
                os.write(2, message.encode())

    def _abort(self, signum: int, frame: FrameType | None) -> None:
        if self._can_abort():
            raise KeyboardInterrupt


def _set_handlers(
    handler: Any, signals: Sequence[signal.Signals] = STOP_SIGNALS
) -> Mapping[signal.Signals, Any]:
    """Set the handler of signals and return the previous ones; SIGHUP remains ignored by nohup."""
    return {
        signum: signal.signal(signum, handler)
        for signum in signals
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN
    }


def _stop_setup(signum: int, frame: FrameType | None) -> None:
    """Raise SetupStoppedError; a second Ctrl-C ends the process, another signal has no effect."""
    _set_handlers(_do_nothing)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SetupStoppedError(signal.Signals(signum).name)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Handle a signal without effect; child processes would inherit SIG_IGN."""
