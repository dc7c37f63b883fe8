"""Worker processes that prepare batches, and the memory that they share with the trainer.

Python runs one thread at a time, so a trainer that tokenises in a thread of its own still pays for
it in the loop. Workers are programs of their own (hlat.data.worker): they get their
settings as JSON through a pipe, write tokens and states into memory that has no name and vanishes
with its last user, and end when the pipe does, so that no kill leaves anything behind.
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

import hlat
from hlat.config.batch import Batch
from hlat.config.data import Data
from hlat.config.errors import ConfigError
from hlat.config.phase import Phase
from hlat.config.plain import to_json
from hlat.data.producer import WorkerDiedError
from hlat.data.rows import Point, States, Tokens

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""A worker is one core: more of them, not more threads, make data faster."""

_PROGRAM = (
    f"import sys; sys.path[0] = {str(Path(hlat.__file__).resolve().parent.parent)!r}; "
    "from hlat.data.worker import main; main()"
)
"""A worker of this very hlat, whatever lies in the folder that it is started in."""


@dataclass(frozen=True)
class Task:
    """What a worker is told once."""

    data: Data
    phase: Phase
    batch: Batch
    seed: int
    numbers: list[int]
    """Its rows' places in the global batch."""
    width: int
    """Integers of a row's state."""
    fingerprint: dict[str, Any]
    """What the worker must find as the trainer did."""


class Slots:
    """Shared memory for a few batches of some rows, and the states after each."""

    def __init__(self, descriptor: int, num_slots: int, rows: int, length: int, width: int) -> None:
        """Map the memory behind a descriptor, made large enough.

        Args:
            descriptor: An open file, `anonymous_file` say.
            num_slots: Batches that fit.
            rows: Rows of a batch.
            length: Tokens of a row.
            width: Integers of a row's state.
        """
        num_states, num_tokens = num_slots * rows * width, num_slots * rows * length
        size = 8 * num_states + 4 * num_tokens
        if os.fstat(descriptor).st_size < size:
            os.truncate(descriptor, size)
        mapped = mmap.mmap(descriptor, size)
        states = np.frombuffer(mapped, np.int64, num_states)
        tokens = np.frombuffer(mapped, np.int32, num_tokens, 8 * num_states)
        self.states: States = states.reshape(num_slots, rows, width)
        self.tokens: Tokens = tokens.reshape(num_slots, rows, length)


def anonymous_file() -> int:
    """Descriptor of a file without a name: memory where the system has it, else a temporary."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hlat-data")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Worker:
    """One worker process, its rows, and the memory shared with it."""

    def __init__(self, task: Task, num_slots: int) -> None:
        self._task, self._num_slots = task, num_slots
        self._descriptor = anonymous_file()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._descriptor],
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # signals to the trainer's group are the trainer's
            )
        except OSError as error:
            os.close(self._descriptor)
            raise WorkerDiedError(f"could not be started ({error})") from error
        sizes = (num_slots, len(task.numbers), task.batch.sequence_length, task.width)
        self._slots = Slots(self._descriptor, *sizes)

    def begin(self, point: Point) -> None:
        """Tell the task and where to stand."""
        slots = [self._descriptor, self._num_slots]
        self._tell(to_json({**vars(self._task), **_plain(point), "slots": slots}))

    def request(self, slot: int) -> None:
        """Ask for the next batch in a slot."""
        self._tell(str(slot))

    def receive(self, slot: int) -> tuple[Tokens, States]:
        """Wait for the batch that was asked for first; views of its slot."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerDiedError(_cause_of_death(self._process.wait()))
        if problems := json.loads(line):
            raise ConfigError(*problems)
        return self._slots.tokens[slot], self._slots.states[slot]

    def close(self) -> None:
        """End the process; it has nothing to lose."""
        self._process.kill()
        self._process.communicate()
        os.close(self._descriptor)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `receive` finds out why


def _plain(point: Point) -> dict[str, Any]:
    stage = point.stage
    return {
        "step": point.step,
        "stage": [stage.start, stage.shares, stage.name],
        "states": point.states.tolist(),
    }


def _cause_of_death(exit_code: int) -> str:
    if exit_code == -9:
        return "was killed, probably by the system for want of memory"
    if exit_code == -7:
        return "lost its memory map: a data file was truncated, or its disk failed"
    return f"ended with exit code {exit_code}; its own words stand above"


class WorkerProducer:
    """Draws in worker processes; the rows are dealt to them in turn."""

    def __init__(self, task: Task, num_workers: int, prefetch: int) -> None:
        """Start nothing yet.

        Args:
            task: What to draw.
            num_workers: Processes; at most one per row is started.
            prefetch: Batches to prepare ahead; 0: draw when asked.
        """
        self._task = task
        self._num_workers = min(num_workers, len(task.numbers))
        self._num_slots = prefetch + 1
        self._workers: list[_Worker] = []
        self._requested = self._received = 0

    def start(self, point: Point) -> None:
        """Prepare the batches after a point, in new processes."""
        self.close()
        shares = [slice(index, None, self._num_workers) for index in range(self._num_workers)]
        for own in shares:
            task = replace(self._task, numbers=self._task.numbers[own])
            self._workers.append(_Worker(task, self._num_slots))
        for own, worker in zip(shares, self._workers, strict=True):
            worker.begin(replace(point, states=point.states[own]))
        self._requested = self._received = 0
        while self._requested < self._num_slots - 1:
            self._request()

    def next(self) -> tuple[Tokens, States]:
        """Wait for the next batch, and the rows' states after it."""
        self._request()
        slot = self._received % self._num_slots
        tokens = np.empty((len(self._task.numbers), self._task.batch.sequence_length), np.int32)
        states = np.empty((len(self._task.numbers), self._task.width), np.int64)
        for index, worker in enumerate(self._workers):
            own = slice(index, None, self._num_workers)
            tokens[own], states[own] = worker.receive(slot)
        self._received += 1
        return tokens, states

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _request(self) -> None:
        for worker in self._workers:
            worker.request(self._requested % self._num_slots)
        self._requested += 1
