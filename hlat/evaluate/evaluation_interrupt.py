"""Signal handling of an evaluation.

The results of a task are on disk as soon as the task has finished. After a signal, rank 0 only
writes the run's event; the other ranks may have exited by then.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

from hlat import launch_environment

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


@contextmanager
def interrupt_on_signal() -> Iterator[Event]:
    """Raise KeyboardInterrupt on rank 0 at the first signal within the context.

    Signals end the other ranks at once, since they only wait for rank 0. hlat's supervisor repeats
    every signal and kills ranks that remain, so rank 0 ignores all further signals under a
    supervisor. Without one, a second signal ends rank 0.

    The event is set after a signal; exceptions may then be caused by ranks that have exited.
    """
    received = Event()

    def handle_signal(*_: object) -> None:
        received.set()
        is_supervised = launch_environment.RECORDS_DIR_ENV in os.environ
        _install_handler(signal.SIG_IGN if is_supervised else signal.SIG_DFL)
        raise KeyboardInterrupt

    is_rank0 = launch_environment.read_rank_info().rank == 0
    previous_handlers = _install_handler(handle_signal if is_rank0 else signal.SIG_DFL)
    try:
        yield received
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def _install_handler(handler: Any) -> dict[int, Any]:
    return {signum: signal.signal(signum, handler) for signum in _SIGNALS}
