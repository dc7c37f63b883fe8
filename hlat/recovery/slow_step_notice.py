"""Messages while a step or an evaluation takes longer than any step before."""

import threading
import time
from collections.abc import Callable
from typing import Any

_FIRST_NOTICE_S = 30.0
_FACTOR = 2.0
"""A notice also needs this multiple of the longest step: regular long steps print none."""


class SlowStepNotice:
    """Context manager that prints the time since the last step, at intervals that double."""

    def __init__(
        self, print_message: Callable[[str], None], first_notice_s: float = _FIRST_NOTICE_S
    ) -> None:
        self._print_message, self._first_notice_s = print_message, first_notice_s
        self._step_time, self._longest_s = time.monotonic(), 0.0
        self._next_notice_s = first_notice_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hlat-slow-step", daemon=True)

    def __enter__(self) -> "SlowStepNotice":
        self._step_time = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stopped.set()
        self._thread.join()

    def step(self) -> None:
        """Record a finished step."""
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._step_time)
        self._step_time = now
        self._next_notice_s = max(self._first_notice_s, _FACTOR * self._longest_s)

    def _run(self) -> None:
        while not self._stopped.wait(self._first_notice_s / 10):
            seconds = time.monotonic() - self._step_time
            if seconds >= self._next_notice_s:
                self._next_notice_s = 2 * seconds
                self._print_message(f"a step or evaluation has been running for {seconds:.0f} s")
