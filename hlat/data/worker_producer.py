"""Worker processes that prepare batches in memory shared with the trainer.

Tokenization in a thread of the trainer competes with the training loop for the GIL. A worker is a
separate program (hlat.data.worker_process). It receives its settings as one JSON line on standard
input, then one line per batch with the number of a buffer slot. It writes tokens and states to
that slot of an anonymous shared memory file and replies with a JSON list of problems, empty on
success. It ends when its standard input closes, and is killed when the thread that started it ends,
so no process or memory survives a killed trainer.
"""

import json
import mmap
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hlat
from hlat.config.batch import BatchConfig
from hlat.config.config_errors import raise_config_errors
from hlat.config.config_json import serialize_sections
from hlat.config.data import DataConfig
from hlat.config.phase import PhaseConfig
from hlat.config.redaction import list_recorded_variables
from hlat.data.batch_producer import WorkerDiedError
from hlat.data.batch_reader import DataCursor, StreamStates, TokenBatch
from hlat.distributed.process_signals import block_signals

_SINGLE_THREAD_ENV = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""One core per worker; data.workers sets the parallelism."""

_WORKER_PROGRAM = (
    f"import sys; sys.path[0] = {str(Path(hlat.__file__).resolve().parent.parent)!r}; "
    "from hlat.data.worker_process import main; main()"
)
"""Import the same hlat as the trainer, whatever the current directory contains."""


@dataclass(frozen=True)
class WorkerTask:
    """Settings that a worker receives once."""

    data: DataConfig
    phase: PhaseConfig
    batch: BatchConfig
    seed: int
    numbers: list[int]
    """Indices of its rows in the global batch."""
    width: int
    """Number of integers in the state of one row."""
    fingerprint: dict[str, Any]
    """Fingerprint of the trainer's data, which the worker's data must match."""


def map_batch_slots(
    file_descriptor: int, num_slots: int, num_rows: int, sequence_length: int, state_width: int
) -> NDArray[Any]:
    """Map an open file as slots of a batch's `tokens` and the stream `states` after it.

    The file is enlarged if necessary.
    """
    states = ("states", np.int64, (num_rows, state_width))
    slot = np.dtype([states, ("tokens", np.int32, (num_rows, sequence_length))])
    size = num_slots * slot.itemsize
    if os.fstat(file_descriptor).st_size < size:
        os.truncate(file_descriptor, size)
    return np.frombuffer(mmap.mmap(file_descriptor, size), slot)


def create_anonymous_file() -> int:
    """Return the descriptor of a memfd, or of an unlinked temporary file without memfd support."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hlat-data")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _WorkerProcess:
    """One worker process and its shared buffer."""

    def __init__(self, task: WorkerTask, num_slots: int) -> None:
        self._task, self._num_slots = task, num_slots
        self._file_descriptor = create_anonymous_file()
        try:
            with block_signals():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _WORKER_PROGRAM],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=[self._file_descriptor],
                    env={**os.environ, **_SINGLE_THREAD_ENV},
                    start_new_session=True,  # for signals that cannot be blocked
                )
        except OSError as error:
            os.close(self._file_descriptor)
            raise WorkerDiedError(f"could not be started ({error})") from error
        sizes = (num_slots, len(task.numbers), task.batch.sequence_length, task.width)
        self._slots = map_batch_slots(self._file_descriptor, *sizes)

    def start(self, cursor: DataCursor) -> None:
        """Send the task and the position."""
        message = {
            **vars(self._task),
            "redacted": list_recorded_variables(),
            "step": cursor.step,
            "stage": cursor.stage.to_json(),
            "states": cursor.states.tolist(),
            "slots": [self._file_descriptor, self._num_slots],
        }
        self._send(serialize_sections(message))

    def request_batch(self, slot: int) -> None:
        """Request the next batch in a slot."""
        self._send(str(slot))

    def receive_batch(self, slot: int) -> tuple[TokenBatch, StreamStates]:
        """Wait for the oldest requested batch; return views of its slot."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerDiedError(_format_exit_reason(self._process.wait()))
        raise_config_errors(json.loads(line))
        return self._slots["tokens"][slot], self._slots["states"][slot]

    def close(self) -> None:
        """Kill the process, which has no state to save."""
        self._process.kill()
        self._process.communicate()
        os.close(self._file_descriptor)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # receive_batch raises with the exit code


def _format_exit_reason(exit_code: int) -> str:
    if exit_code == -9:
        return "was killed, probably by the system for want of memory"
    if exit_code == -7:
        return "lost its memory map: a data file was truncated, or its disk failed"
    return f"ended with exit code {exit_code}; see its output above"


class WorkerProducer:
    """Prefetch in worker processes; worker i of n prepares rows i, i+n, i+2n ..."""

    def __init__(self, task: WorkerTask, num_workers: int, prefetch: int) -> None:
        """Create a producer with at most one worker per row; `start` starts the workers."""
        self._task = task
        self._num_workers = min(num_workers, len(task.numbers))
        self._num_slots = prefetch + 1
        self._workers: list[_WorkerProcess] = []
        self._num_requested = self._num_received = 0

    def start(self, cursor: DataCursor) -> None:
        """Prepare the batches after `cursor` in new processes."""
        self.close()
        slices = [slice(index, None, self._num_workers) for index in range(self._num_workers)]
        for rows in slices:
            task = replace(self._task, numbers=self._task.numbers[rows])
            self._workers.append(_WorkerProcess(task, self._num_slots))
        for rows, worker in zip(slices, self._workers, strict=True):
            worker.start(replace(cursor, states=cursor.states[rows]))
        self._num_requested = self._num_received = 0
        while self._num_requested < self._num_slots - 1:
            self._request_batch()

    def next_batch(self) -> tuple[TokenBatch, StreamStates]:
        """Wait for the next batch and the states after it."""
        self._request_batch()
        slot = self._num_received % self._num_slots
        num_rows = len(self._task.numbers)
        tokens = np.empty((num_rows, self._task.batch.sequence_length), np.int32)
        states = np.empty((num_rows, self._task.width), np.int64)
        for index, worker in enumerate(self._workers):
            rows = slice(index, None, self._num_workers)
            tokens[rows], states[rows] = worker.receive_batch(slot)
        self._num_received += 1
        return tokens, states

    def close(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _request_batch(self) -> None:
        for worker in self._workers:
            worker.request_batch(self._num_requested % self._num_slots)
        self._num_requested += 1
