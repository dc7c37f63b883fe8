"""Turns Ctrl-C and a scheduler's signals into a request to stop at the next step boundary."""

import contextlib
import os
import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class Interruption:
    """Context in which the first signal is remembered and only the second one obeyed.

    Attributes:
        signal_name: Name of the signal that asked the run to stop; None while nobody did.
    """

    def __init__(self, tell: bool = True) -> None:
        """Say on stderr that a signal was heard, if `tell`."""
        self._tell = tell
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
        self._restore()
        self.signal_name = signal.Signals(number).name
        if not self._tell:
            return
        told = f"\nhlat: {self.signal_name}: this step, then a save (again: at once)\n"
        # print is not safe in a handler, which may have interrupted one; and stderr may be gone
        with contextlib.suppress(OSError):
            os.write(2, told.encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
