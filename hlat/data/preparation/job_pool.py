"""Jobs in worker processes: how far they are, how they are stopped, and that none outlives us.

Reading JSON keeps a core busy, so jobs need processes; and any of them may be killed at any time,
for want of memory or by hand. A lock or a queue that processes share dies with whoever holds it, so
a worker shares nothing: it has a pipe to its parent, whose end tells either of the other's death,
and since a job appears whole or not at all, to stop a worker is to kill it.
"""

import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Generic, TypeVar

from hlat.config.errors import ConfigError
from hlat.data.preparation.progress import Progress

JobT = TypeVar("JobT")
Tick = Callable[[int], None]
"""Told how many further bytes are done."""
Work = Callable[[JobT, Tick], None]


def run(
    work: Work[JobT], jobs: Sequence[JobT], num_workers: int, progress: Progress
) -> Iterator[JobT]:
    """Do all jobs, in this process if one worker is enough, and yield each when it is done.

    Args:
        work: Does a job; a function of a module, as other processes must find it.
        jobs: In the order in which they are begun.
        num_workers: Processes at most.
        progress: Told the bytes that are done.

    Raises:
        ConfigError: What the first job that fails raises; those under way are stopped.
        OSError: The same.
        ChildProcessError: If a worker was killed.
    """
    num_workers = min(num_workers, len(jobs))
    if num_workers > 1:
        yield from _run_in_processes(work, jobs, num_workers, progress)
        return
    for job in jobs:
        work(job, progress.add)
        yield job


def _run_in_processes(
    work: Work[JobT], jobs: Sequence[JobT], num_workers: int, progress: Progress
) -> Iterator[JobT]:
    waiting = deque(jobs)
    workers: dict[Connection, _Worker[JobT]] = {}
    try:
        with _interrupts_ignored():  # what is started meanwhile goes on ignoring them
            for _ in range(num_workers):
                worker = _Worker(work)
                workers[worker.pipe] = worker
        for worker in workers.values():
            worker.begin(waiting.popleft())
        while busy := [pipe for pipe, worker in workers.items() if worker.job is not None]:
            for pipe in wait(busy):
                assert isinstance(pipe, Connection)
                worker = workers[pipe]
                answer = worker.receive()
                if answer is not None:
                    progress.add(answer)
                    continue
                done = worker.job
                worker.job = None
                if waiting:
                    worker.begin(waiting.popleft())
                assert done is not None
                yield done
    finally:
        for worker in workers.values():
            worker.end()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Worker(Generic[JobT]):
    """A process that does one job at a time, as its parent sees it."""

    def __init__(self, work: Work[JobT]) -> None:
        context = SpawnContext()  # the threads of Arrow do not survive a fork
        self.pipe, theirs = context.Pipe()
        self.job: JobT | None = None
        self._process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, job: JobT) -> None:
        self.job = job
        try:
            self.pipe.send(job)
        except OSError as error:
            raise _killed() from error

    def receive(self) -> int | None:
        """Further bytes that are done; None: the job is."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise _killed() from error
        if isinstance(answer, Exception):
            raise answer
        assert answer is None or isinstance(answer, int)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _killed() -> ChildProcessError:
    return ChildProcessError(
        "a worker process was killed, perhaps for want of memory (then use fewer --workers)"
    )


def _serve(pipe: Connection, work: Work[JobT]) -> None:
    """Do jobs until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def send(answer: object) -> None:
        try:
            pipe.send(answer)
        except OSError:  # no reason for a job to go on, and nothing that it should take for its own
            os._exit(1)

    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        send(_attempt(work, job, send))


def _attempt(work: Work[JobT], job: JobT, tick: Tick) -> Exception | None:
    """Do a job; what it raises is returned, as far as another process can be told of it."""
    try:
        work(job, tick)
    except (ConfigError, OSError) as error:
        return error
    except Exception:
        return RuntimeError(traceback.format_exc())
    return None
