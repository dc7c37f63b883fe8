"""Ctrl-C and a scheduler's signals, as those hear them who ask and those who only answer.

What a task came to is on disk as soon as it is finished, so there is nothing to save. Only who asks
has a last word to say to the run's record, and does so when the others may be gone already.
"""

import os
import signal
from types import FrameType
from typing import Any

from hlat.engine import processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class Interruptible:
    """Context in which the first signal raises KeyboardInterrupt on the first process.

    The others end at once, in whatever wait for the first they are. If hlat's supervisor has
    started them, it sends signals twice and ends by force who stays, so that the first process
    ignores all but the first one; elsewhere the second one ends it at once.

    Attributes:
        heard: Whether there was one; then an exception is but a peer's being gone.
    """

    def __init__(self) -> None:
        self.heard = False

    def __enter__(self) -> "Interruptible":
        leads = processes.place().rank == 0
        self._before: dict[int, Any] = _set(self._hear if leads else signal.SIG_DFL)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        _set(signal.SIG_IGN if processes.RECORDS in os.environ else signal.SIG_DFL)
        raise KeyboardInterrupt


def _set(handler: Any) -> dict[int, Any]:
    return {number: signal.signal(number, handler) for number in _SIGNALS}
