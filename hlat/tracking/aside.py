"""Lets a listener do its work beside the training loop, where it can neither stop nor slow it.

A service may be down, its process killed, its disk full, its network a black hole. So whatever a
listener is told waits in a queue for a thread of its own; what fails is told once, what the queue
cannot hold is left out, and at the end the run waits for a limited time.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hlat.tracking.listener import Beginning, Listener, Row

_LOGGER = logging.getLogger("hlat")
_MAX_WAITING = 10_000
"""Rows and events that may wait: hours of a run that logs every second."""
_SECONDS_TO_FINISH = 30.0
"""Given to a listener when the run is over: Slurm's default between a signal and the end."""
_LEAST_STALL_S, _STALL_FACTOR = 300.0, 10.0
"""A run that says nothing for so long, and for so much longer than ever before, has stalled."""


class Aside:
    """A listener that never raises and never waits for the one it stands for.

    Args:
        name: What to call the listener in a warning.
        listener: The listener; it is called from one thread only.
    """

    def __init__(self, name: str, listener: Listener) -> None:
        self._name, self._listener = name, listener
        self._waiting: queue.Queue[tuple[str, Any] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"hlat-{name}", daemon=True)
        self._warned = self._ended = self._stalled = False
        self._step, self._longest = 0, 0.0

    def begin(self, beginning: Beginning) -> None:
        """Start the thread, which tells the listener."""
        self._thread.start()
        self._tell("begin", beginning)

    def row(self, row: Row) -> None:
        """Tell the listener in time."""
        self._tell("row", row)

    def event(self, row: Row) -> None:
        """Tell the listener in time."""
        self._tell("event", row)

    def rewind(self, step: int) -> None:
        """Tell the listener in time."""
        self._tell("rewind", step)

    def finish(self, summary: Mapping[str, float]) -> None:
        """Tell the listener, and give it half a minute to end well."""
        if self._ended:
            return
        self._tell("finish", summary)
        self._ended = True
        with suppress(queue.Full):  # it has stood still for long, and the warning was given then
            self._waiting.put_nowait(None)
        self._thread.join(_SECONDS_TO_FINISH)
        if self._thread.is_alive():
            self._warn(f"{self._name} has not ended after {_SECONDS_TO_FINISH:g} s")
            self.abandon()

    def abandon(self) -> None:
        """Have the listener leave everything as it is; whoever failed may fail at that too."""
        with suppress(Exception):
            self._listener.abandon()

    def _tell(self, method: str, argument: Any) -> None:
        if self._ended:
            return
        try:
            self._waiting.put_nowait((method, argument))
        except queue.Full:
            self._warn(f"{self._name} has not kept up, and does not hear of all rows from here on")

    def _work(self) -> None:
        while (told := self._next()) is not None:
            method, argument = told
            try:
                getattr(self._listener, method)(argument)
            except Exception as error:  # of a foreign library, whatever it may be
                kind, first = type(error).__name__, str(error).strip().partition("\n")[0]
                self._warn(
                    f"{self._name} is left out from here on: {kind}{': ' * bool(first)}{first}; "
                    "training goes on"
                )
                self._ended = True
                self.abandon()
                return

    def _next(self) -> tuple[str, Any] | None:
        """Return what is to be told next: a stall, once, when nothing comes for too long."""
        since = time.monotonic()
        try:
            told = self._waiting.get(timeout=self._patience())
        except queue.Empty:
            self._stalled = True
            seconds = round(time.monotonic() - since)
            return "event", {"event": "stall", "step": self._step, "seconds": seconds}
        if told is not None and told[0] == "row":
            if self._step:
                self._longest = max(self._longest, time.monotonic() - since)
            self._step, self._stalled = told[1]["step"], False
        return told

    def _patience(self) -> float | None:
        """Return how long to wait for news; None: for ever, as start-up and compilation may."""
        if self._stalled or not self._step:
            return None
        return max(_LEAST_STALL_S, _STALL_FACTOR * self._longest)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            _LOGGER.warning(problem)
        self._warned = True
