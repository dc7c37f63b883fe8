"""A MetricLogger that runs another one in a background thread.

A service may be unavailable, its process killed, its disk full, or its network unreachable. Rows
are therefore passed through a bounded queue to a thread. The first failure is logged as a warning,
rows beyond the capacity of the queue are dropped, and `finish` has a timeout.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hlat.tracking.metric_logger import MetricLogger, RunInfo
from hlat.tracking.row_validation import Row

_LOGGER = logging.getLogger("hlat")
_MAX_QUEUE_SIZE = 10_000
"""Rows and events; several hours of a run that logs every second."""
_FINISH_TIMEOUT_S = 30.0
"""Slurm's default time between the termination signal and SIGKILL (KillWait)."""
_MIN_STALL_S, _STALL_FACTOR = 300.0, 10.0
"""A run stalls if no row arrives for 300 s and for 10 times the longest interval so far."""


class AsyncLogger(MetricLogger):
    """Wrapper of the logger of the service `name` that never raises and never blocks training."""

    def __init__(self, name: str, logger: MetricLogger) -> None:
        self._name, self._logger = name, logger
        self._queue: queue.Queue[tuple[str, Any] | None] = queue.Queue(_MAX_QUEUE_SIZE)
        self._thread = threading.Thread(target=self._run_worker, name=f"hlat-{name}", daemon=True)
        self._warned = self._closed = self._stalled = False
        self._step, self._longest_gap_s = 0, 0.0

    def start(self, run_info: RunInfo) -> None:
        """Start the thread and the wrapped logger."""
        self._thread.start()
        self._enqueue("start", run_info)

    def log_metrics(self, row: Row) -> None:
        """Enqueue a row of metrics.jsonl."""
        self._enqueue("log_metrics", row)

    def log_event(self, row: Row) -> None:
        """Enqueue a row of events.jsonl."""
        self._enqueue("log_event", row)

    def rewind(self, step: int) -> None:
        """Enqueue a rewind to `step`."""
        self._enqueue("rewind", step)

    def finish(self, summary: Mapping[str, float]) -> None:
        """Finish the wrapped logger within 30 s, or abort it."""
        if self._closed:
            return
        self._enqueue("finish", summary)
        self._closed = True
        with suppress(queue.Full):  # the warning was logged when the queue filled up
            self._queue.put_nowait(None)
        self._thread.join(_FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn(f"{self._name} has not finished after {_FINISH_TIMEOUT_S:g} s")
            self.abort()

    def abort(self) -> None:
        """Abort the wrapped logger and ignore its errors."""
        with suppress(Exception):
            self._logger.abort()

    def _enqueue(self, method: str, argument: Any) -> None:
        if self._closed:
            return
        try:
            self._queue.put_nowait((method, argument))
        except queue.Full:
            self._warn(f"{self._name} is too slow; some rows are dropped")

    def _run_worker(self) -> None:
        while (call := self._get_next_call()) is not None:
            method, argument = call
            try:
                getattr(self._logger, method)(argument)
            except Exception as error:  # services raise errors of any type
                name, message = type(error).__name__, str(error).strip().partition("\n")[0]
                self._warn(
                    f"{self._name} is disabled after {name}{': ' * bool(message)}{message}; "
                    "training continues"
                )
                self._closed = True
                self.abort()
                return

    def _get_next_call(self) -> tuple[str, Any] | None:
        """Return the next method and argument, or one "stall" event after the timeout."""
        since = time.monotonic()
        try:
            call = self._queue.get(timeout=self._get_timeout_s())
        except queue.Empty:
            self._stalled = True
            seconds = round(time.monotonic() - since)
            return "log_event", {"event": "stall", "step": self._step, "seconds": seconds}
        if call is not None and call[0] == "log_metrics":
            if self._step:
                self._longest_gap_s = max(self._longest_gap_s, time.monotonic() - since)
            self._step, self._stalled = call[1]["step"], False
        return call

    def _get_timeout_s(self) -> float | None:
        """Return the stall timeout; None before the first row, as compilation may take hours."""
        if self._stalled or not self._step:
            return None
        return max(_MIN_STALL_S, _STALL_FACTOR * self._longest_gap_s)

    def _warn(self, message: str) -> None:
        if not self._warned:
            _LOGGER.warning(message)
        self._warned = True
