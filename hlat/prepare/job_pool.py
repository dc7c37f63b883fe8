"""Pool of worker processes for conversion jobs.

Parsing JSON is CPU-bound, so jobs run in processes, which may be killed at any time. A
ProcessPoolExecutor of Python 3.11 can miss the death of the worker that it started last, as it
waits for the workers that existed before `submit`. Each worker therefore has a pipe to its parent,
which detects the death of either side. Jobs are atomic, so a worker is stopped by killing it.
"""

import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Generic, TypeVar

from hlat.config.config_errors import ConfigError
from hlat.recovery.signal_handler import handle_signals
from hlat.storage.progress_bar import ProgressBar

MIN_WORKER_BYTES = 16 << 20
"""Bytes of text per worker that copies or counts documents."""

JobT = TypeVar("JobT")
ProgressCallback = Callable[[int], None]
"""Function called with a number of completed bytes."""
JobFunction = Callable[[JobT, ProgressCallback], None]


def limit_workers(num_workers: int, num_bytes: int) -> int:
    """Return the number of workers whose start takes less time than they save."""
    return min(num_workers, 1 + num_bytes // MIN_WORKER_BYTES)


def run_jobs(
    run_job: JobFunction[JobT], jobs: Sequence[JobT], num_workers: int, progress: ProgressBar
) -> Iterator[JobT]:
    """Run all jobs and yield each when it is finished; a single worker runs in this process.

    `run_job` is a function of a module, which other processes can import. The error of the first
    job that fails stops the others.

    Raises:
        ChildProcessError: If a worker was killed.
    """
    num_workers = min(num_workers, len(jobs))
    if num_workers > 1:
        yield from _run_in_processes(run_job, jobs, num_workers, progress)
        return
    for job in jobs:
        run_job(job, progress.add)
        yield job


def _run_in_processes(
    run_job: JobFunction[JobT], jobs: Sequence[JobT], num_workers: int, progress: ProgressBar
) -> Iterator[JobT]:
    queue = deque(jobs)
    workers: dict[Connection, _JobProcess[JobT]] = {}
    try:
        with handle_signals(signal.SIG_IGN, [signal.SIGINT]):  # inherited by the workers
            for _ in range(num_workers):
                worker = _JobProcess(run_job)
                workers[worker.pipe] = worker
        for worker in workers.values():
            worker.start(queue.popleft())
        while busy := [pipe for pipe, worker in workers.items() if worker.job is not None]:
            for pipe in wait(busy):
                assert isinstance(pipe, Connection)
                worker = workers[pipe]
                num_bytes = worker.receive()
                if num_bytes is not None:
                    progress.add(num_bytes)
                    continue
                finished, worker.job = worker.job, None
                if queue:
                    worker.start(queue.popleft())
                assert finished is not None
                yield finished
    finally:
        for worker in workers.values():
            worker.stop()


class _JobProcess(Generic[JobT]):
    """Parent's view of a process that runs one job at a time."""

    def __init__(self, run_job: JobFunction[JobT]) -> None:
        context = SpawnContext()  # Arrow's threads do not survive a fork
        self.pipe, child_pipe = context.Pipe()
        self.job: JobT | None = None
        self._process = context.Process(target=_run_worker, args=(child_pipe, run_job), daemon=True)
        self._process.start()
        child_pipe.close()

    def start(self, job: JobT) -> None:
        self.job = job
        try:
            self.pipe.send(job)
        except OSError as error:
            raise _build_killed_error() from error

    def receive(self) -> int | None:
        """Return a number of completed bytes, or None if the job is finished."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise _build_killed_error() from error
        if isinstance(message, Exception):
            raise message
        assert message is None or isinstance(message, int)
        return message

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _build_killed_error() -> ChildProcessError:
    return ChildProcessError(
        "a worker process was killed, possibly out of memory (then use fewer workers=)"
    )


def _run_worker(pipe: Connection, run_job: JobFunction[JobT]) -> None:
    """Run jobs until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def send(message: object) -> None:
        try:
            pipe.send(message)
        except OSError:  # the parent is dead; an exception would be attributed to the job
            os._exit(1)

    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        send(_try_job(run_job, job, send))


def _try_job(
    run_job: JobFunction[JobT], job: JobT, on_progress: ProgressCallback
) -> Exception | None:
    """Run a job and return its exception in a form that can be pickled."""
    try:
        run_job(job, on_progress)
    except (ConfigError, OSError) as error:
        return error
    except Exception:
        return RuntimeError(traceback.format_exc())
    return None
