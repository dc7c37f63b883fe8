"""Scheduler of the server: one thread decodes a batch, which waiting generations join.

The coroutine of a request reads the parts of its completions from an `asyncio.Queue`. If it ends
early, because the client disconnects, its generations are removed from queue and batch.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hlat.inference.decode_batch import DecodeSequence
from hlat.inference.server_generation import (
    Finish,
    Generation,
    GenerationRequest,
    TextPart,
    TokenNames,
)
from hlat.inference.text_generator import TextGenerator

MAX_WAITING = 1024
"""Maximum number of waiting generations; further requests are rejected."""
_POLL_INTERVAL_S = 0.1
"""Interval at which the idle thread looks for a stop. A signal handler, which may interrupt the
owner of the lock, must not use it to wake the thread."""


class UnavailableError(Exception):
    """Too many generations are waiting, or the server stops."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class _Output:
    """Completions of one request, read by its coroutine."""

    loop: asyncio.AbstractEventLoop
    queue: "asyncio.Queue[tuple[int, TextPart | Finish | Exception]]" = field(
        default_factory=asyncio.Queue
    )
    is_cancelled: bool = False


@dataclass(eq=False)
class _Job:
    """One generation of a request."""

    index: int
    generation: Generation
    output: _Output


class GenerationQueue:
    """Generations of one model."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator, self._names = generator, TokenNames(generator)
        self._batch = generator.create_batch()
        self._active: dict[DecodeSequence, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._condition = threading.Condition()
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[tuple[int, TextPart | Finish]]:
        """Yield the parts of completions as they appear, with the index of the request.

        Raise UnavailableError at once if too many generations are waiting, or when the server
        stops.
        """
        output = _Output(asyncio.get_running_loop())
        self._submit(
            [
                _Job(index, Generation(request, self._generator, self._names), output)
                for index, request in enumerate(requests)
            ]
        )
        num_unfinished = len(requests)
        try:
            while num_unfinished:
                index, item = await output.queue.get()
                if isinstance(item, Exception):
                    raise item
                num_unfinished -= isinstance(item, Finish)
                yield index, item
        finally:
            if num_unfinished:
                self._cancel(output)

    def stop(self, limit_s: float) -> None:
        """Reject waiting and new generations, and end the others after this time.

        It uses no lock, so that a signal handler can call it.
        """
        self._deadline = time.monotonic() + limit_s

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread after `stop`; return False if it still computes."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _submit(self, jobs: list[_Job]) -> None:
        with self._condition:
            if self._deadline is not None:
                raise _build_stop_error(0)
            if len(self._waiting) + len(jobs) > MAX_WAITING:
                message = f"{len(self._waiting)} completions are waiting; try again later"
                raise UnavailableError(message, "overloaded")
            self._waiting += jobs
            self._condition.notify()

    def _cancel(self, output: _Output) -> None:
        with self._condition:
            output.is_cancelled = True
            self._waiting = deque(job for job in self._waiting if job.output is not output)

    def _run(self) -> None:
        while self._deadline is None or (self._active and time.monotonic() < self._deadline):
            for job in [job for job in self._active.values() if job.output.is_cancelled]:
                self._remove(job)
            # One prompt per step, so that requests of a single token do not stall the others
            if (next_job := self._take_waiting()) is not None:
                self._start(next_job)
            self._step()
        with self._condition:
            self._reject_waiting()
        for job in self._active.values():
            _send(job, _build_stop_error(len(job.generation.sequence.tokens)))

    def _reject_waiting(self) -> None:
        while self._waiting:
            _send(self._waiting.popleft(), _build_stop_error(0))

    def _take_waiting(self) -> _Job | None:
        """Return the next generation that fits into the batch; wait for one if it is empty."""
        with self._condition:
            if self._deadline is not None:
                self._reject_waiting()
            if not self._waiting and not self._active:
                self._condition.wait(_POLL_INTERVAL_S)
            if self._waiting and self._batch.has_room(self._waiting[0].generation.sequence):
                return self._waiting.popleft()
            return None

    def _start(self, job: _Job) -> None:
        sequence = job.generation.sequence
        self._active[sequence] = job
        try:
            job.generation.start(*self._batch.add(sequence))
        except Exception as error:  # sent to the client of this request; the server goes on
            self._fail([job], error)
        else:
            self._send_parts(job)

    def _step(self) -> None:
        """Generate the next token of the active generations."""
        try:
            tokens = self._batch.step()
        except Exception as error:
            self._fail(list(self._active.values()), error)
            return
        for sequence, token in tokens:
            job = self._active[sequence]
            try:
                job.generation.append(token)
            except Exception as error:
                self._fail([job], error)
            else:
                self._send_parts(job)

    def _send_parts(self, job: _Job) -> None:
        parts, job.generation.parts = job.generation.parts, []
        _send(job, *parts)
        if parts and isinstance(parts[-1], Finish):
            self._remove(job)

    def _fail(self, jobs: list[_Job], error: Exception) -> None:
        for job in jobs:
            _send(job, error)
            self._remove(job)

    def _remove(self, job: _Job) -> None:
        self._batch.remove(job.generation.sequence)
        del self._active[job.generation.sequence]


def _send(job: _Job, *items: TextPart | Finish | Exception) -> None:
    """Send items to the coroutine of a request."""
    output = job.output

    def put() -> None:
        for item in items:
            output.queue.put_nowait((job.index, item))

    with suppress(RuntimeError):  # the event loop was closed by a stop of the server
        output.loop.call_soon_threadsafe(put)


def _build_stop_error(num_tokens: int) -> UnavailableError:
    when = (
        f"after {num_tokens} tokens of this completion" if num_tokens else "before this completion"
    )
    return UnavailableError(f"the server was stopped {when}", "server_stopped")
