"""Turns Ctrl-C and a scheduler's signals into a request to stop at the next step boundary."""

import contextlib
import math
import os
import signal
import time
from types import FrameType

ECHO_S = 2.0
"""Slurm ends a job by a signal to each of its processes, among them the supervisor, which passes it
on: to a supervised process, a signal this soon after another one is the same."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class Interruption:
    """Context in which the first signal is remembered and only the second one obeyed.

    Attributes:
        signal_name: Name of the signal that asked the run to stop; None while nobody did.
    """

    def __init__(self, tell: bool = True, echo_s: float = 0.0) -> None:
        """Say on stderr that a signal was heard, if `tell`; forget others for `echo_s` seconds."""
        self._tell, self._echo_s = tell, echo_s
        self._heard = -math.inf
        self.signal_name: str | None = None

    def __enter__(self) -> "Interruption":
        self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def ignore(self) -> None:
        """Ignore further signals until the context ends: all is saved, the rest is short."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() < self._heard + self._echo_s:
            return
        if self.signal_name is not None or not self._echo_s:
            self._restore()
        if self.signal_name is not None:
            signal.raise_signal(number)
            return
        self._heard, self.signal_name = time.monotonic(), signal.Signals(number).name
        if not self._tell:
            return
        told = f"\nhlat: {self.signal_name}: this step, then a save (again: at once)\n"
        # print is not safe in a handler, which may have interrupted one; and stderr may be gone
        with contextlib.suppress(OSError):
            os.write(2, told.encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
