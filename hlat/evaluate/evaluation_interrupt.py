"""Signal handling of an evaluation.

The results of a task are on disk as soon as the task has finished. After a signal, rank 0 only
writes the run's event; the other ranks may have exited by then.
"""

import os
import signal
from types import FrameType
from typing import Any

from hlat.engine import launch_environment

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class InterruptHandler:
    """Context in which the first signal raises KeyboardInterrupt on rank 0.

    Signals end the other ranks at once, since they only wait for rank 0. hlat's supervisor repeats
    every signal and kills ranks that remain, so rank 0 ignores all further signals under a
    supervisor. Without one, a second signal ends rank 0.

    Attributes:
        received: True after a signal; exceptions may then be caused by ranks that have exited.
    """

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> "InterruptHandler":
        is_rank0 = launch_environment.read_rank_info().rank == 0
        self._previous_handlers: dict[int, Any] = _install_handler(
            self._handle_signal if is_rank0 else signal.SIG_DFL
        )
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
        is_supervised = launch_environment.RECORDS_DIR_ENV in os.environ
        _install_handler(signal.SIG_IGN if is_supervised else signal.SIG_DFL)
        raise KeyboardInterrupt


def _install_handler(handler: Any) -> dict[int, Any]:
    return {signum: signal.signal(signum, handler) for signum in _SIGNALS}
