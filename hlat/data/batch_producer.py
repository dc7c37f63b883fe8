"""Interface of batch prefetching, and a thread that implements it.

Batches are prepared while the device computes. Each batch is returned with the stream states that
follow it, so a checkpoint describes the batches that the training loop received.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from hlat.data.batch_reader import BatchReader, DataCursor, StreamStates, TokenBatch


class WorkerDiedError(RuntimeError):
    """A worker process ended; `BatchProducer.start` with the last cursor replaces it."""


class BatchProducer(Protocol):
    """Source of consecutive batches with prefetch."""

    def start(self, cursor: DataCursor) -> None:
        """Discard prefetched batches and prepare the batches after `cursor`."""

    def next_batch(self) -> tuple[TokenBatch, StreamStates]:
        """Wait for the next batch and the states after it; the caller owns both arrays.

        After an error, call `start` again.

        Raises:
            ConfigError: If a file is no longer readable.
            WorkerDiedError: If a worker process ended.
        """

    def close(self) -> None:
        """Stop prefetching and wait for its threads or processes to end."""


class ThreadProducer:
    """Prefetch in a thread of this process; the tokenizers release the GIL."""

    def __init__(self, reader: BatchReader, prefetch: int) -> None:
        """Create an idle producer; a `prefetch` of 0 reads each batch on request."""
        self._reader = reader
        self._prefetch = prefetch
        self._pending: deque[Future[tuple[TokenBatch, StreamStates]]] = deque()
        self._thread = ThreadPoolExecutor(1, "hlat-data")

    def start(self, cursor: DataCursor) -> None:
        """Discard prefetched batches and prepare the batches after `cursor`."""
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        self._thread.submit(self._reader.restore, cursor).result()

    def next_batch(self) -> tuple[TokenBatch, StreamStates]:
        """Wait for the next batch and the states after it."""
        while len(self._pending) <= self._prefetch:
            self._pending.append(self._thread.submit(self._reader.read_batch))
        return self._pending.popleft().result()

    def close(self) -> None:
        """Stop prefetching and wait for the thread to end."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)
