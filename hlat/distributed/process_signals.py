"""Signals that stop a run or write the stacks of a process, and their effect on child processes."""

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hlat.distributed.rank_environment import RECORDS_DIR_ENV, read_rank_info

STOP_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
"""Signals on which a run saves its state and ends with exit code 75: Ctrl-C, those with which
schedulers end a job or announce its time limit, and the one of a CPU time limit."""
DUMP_SIGNAL = signal.SIGQUIT
"""Signal on which a process writes the stacks of its threads and continues."""
_STDERR = 2
"""File descriptor."""
_PR_SET_PDEATHSIG = 1
"""Constant of linux/prctl.h."""


def register_stack_dumps() -> None:
    """Write the stacks of all threads on `DUMP_SIGNAL`.

    A supervised process writes to the file that its supervisor reads, another one to stderr.
    """
    path = get_stacks_path(Path(os.environ.get(RECORDS_DIR_ENV, "")), read_rank_info().rank)
    # faulthandler keeps a reference to the file
    file = path.open("a") if RECORDS_DIR_ENV in os.environ else _STDERR
    faulthandler.register(DUMP_SIGNAL, file, all_threads=True)


@contextmanager
def block_signals() -> Iterator[None]:
    """Start child processes that never receive the signals of the run.

    Schedulers signal every process of a job, and a terminal every process of the foreground. A
    child process inherits the signal mask of the thread that starts it.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, DUMP_SIGNAL))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def kill_with_parent() -> None:
    """Make Linux kill this process when the thread that started it ends, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def get_stacks_path(records_dir: Path, rank: int) -> Path:
    """Return the path of a rank's stacks."""
    return records_dir / f"rank_{rank}.stacks"
