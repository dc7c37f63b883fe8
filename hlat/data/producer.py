"""Prepares batches ahead of the step that consumes them.

A training loop must never wait for data. Batches are drawn while the device computes, each with the
states that follow it, so that what a checkpoint takes describes what the loop has received and
nothing of what is merely prepared.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from hlat.data.rows import Point, Rows, States, Tokens


class WorkerDiedError(RuntimeError):
    """A process that prepares batches ended; it can be started again at the last point."""


class Producer(Protocol):
    """Draws the batches of some rows in order, some of them ahead."""

    def start(self, point: Point) -> None:
        """Prepare the batches after a point; forget what was prepared before."""

    def next(self) -> tuple[Tokens, States]:
        """Wait for the next batch, and the rows' states after it; both are the caller's to keep.

        Raises:
            ConfigError: If a file cannot be read any more.
            WorkerDiedError: If the preparing process is gone. After either, call `start`.
        """

    def close(self) -> None:
        """Stop preparing, and wait until everything that did has ended."""


class ThreadProducer:
    """Draws in a thread of this process: tokenisers let other threads run meanwhile."""

    def __init__(self, rows: Rows, prefetch: int) -> None:
        """Prepare nothing yet.

        Args:
            rows: What to draw.
            prefetch: Batches to prepare ahead; 0: draw when asked.
        """
        self._rows = rows
        self._prefetch = prefetch
        self._pending: deque[Future[tuple[Tokens, States]]] = deque()
        self._thread = ThreadPoolExecutor(1, "hlat-data")

    def start(self, point: Point) -> None:
        """Prepare the batches after a point; forget what was prepared before."""
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        self._thread.submit(self._rows.restore, point).result()

    def next(self) -> tuple[Tokens, States]:
        """Wait for the next batch, and the rows' states after it."""
        while len(self._pending) <= self._prefetch:
            self._pending.append(self._thread.submit(self._draw))
        return self._pending.popleft().result()

    def close(self) -> None:
        """Stop preparing, and wait until the thread has ended."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _draw(self) -> tuple[Tokens, States]:
        return self._rows.draw(), self._rows.states()
