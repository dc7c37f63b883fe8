"""Queue of generations: one thread computes them in the order in which they arrive.

The coroutine of a request reads its text from a queue of its own and cancels its job when the
client disconnects.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from hlat.generate.text_generator import Completion, SamplingSettings, TextGenerator

MAX_WAITING = 64
"""Maximum number of waiting generations; further ones are rejected."""


_POLL_INTERVAL_S = 0.1
"""Interval at which the idle thread looks for a stop. A signal handler, which may interrupt a put,
must not use the lock of the queue to wake the thread."""


class UnavailableError(Exception):
    """Too many generations are waiting, or the server stops."""


@dataclass
class _Job:
    prompt: list[int]
    settings: SamplingSettings
    loop: asyncio.AbstractEventLoop
    output: "asyncio.Queue[str | Completion | Exception]" = field(default_factory=asyncio.Queue)
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    def put(self, item: str | Completion | Exception) -> None:
        """Send a part of the text, its completion, or an error to the coroutine of the request."""
        with suppress(RuntimeError):  # the event loop was closed by a stop of the server
            self.loop.call_soon_threadsafe(self.output.put_nowait, item)


class GenerationQueue:
    """Generations of one model, computed one at a time."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator
        self._jobs: queue.Queue[_Job] = queue.Queue(MAX_WAITING)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: list[int], settings: SamplingSettings
    ) -> AsyncIterator[str | Completion]:
        """Yield the parts of a text, and at last its completion.

        Raise UnavailableError at once if too many generations are waiting.
        """
        job = _Job(prompt, settings, asyncio.get_running_loop())
        try:
            self._jobs.put_nowait(job)
        except queue.Full as error:
            raise UnavailableError(
                f"{MAX_WAITING} requests are waiting; try again later"
            ) from error
        try:
            while True:
                item = await job.output.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, Completion):
                    return
        finally:
            job.is_cancelled.set()

    def stop(self) -> None:
        """End the current generation after its next token, and all that are waiting."""
        self._is_stopped.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread after `stop`; return False if it still computes."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            with suppress(queue.Empty):
                job = self._jobs.get(timeout=_POLL_INTERVAL_S)
                if not job.is_cancelled.is_set():
                    self._run_job(job)
        while not self._jobs.empty():
            self._jobs.get().put(UnavailableError("the server stops"))

    def _run_job(self, job: _Job) -> None:
        def is_cancelled() -> bool:
            return job.is_cancelled.is_set() or self._is_stopped.is_set()

        try:
            job.put(self._generator.stream(job.prompt, job.settings, job.put, is_cancelled))
        except Exception as error:  # sent to the client of this request; the server goes on
            job.put(error)
