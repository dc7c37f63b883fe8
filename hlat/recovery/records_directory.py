"""Directory of a supervisor for exit records, heartbeats and logs of its workers."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hlat.distributed.rank_environment import RECORDS_DIR_ENV

_PREFIX, _LOCK_FILE = "hlat-supervisor-", "alive"
"""Prefix of the directories, and the file in each that a live supervisor locks."""


@contextmanager
def create_records_dir() -> Iterator[Path]:
    """Create a locked temporary directory; remove those of killed supervisors and their workers."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK_FILE}"):
        with suppress(OSError), lock.open() as file:  # another user's, or still locked
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _kill_orphans(lock.parent)
            shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        records_dir = Path(name)
        with (records_dir / ".alive").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (records_dir / ".alive").rename(records_dir / _LOCK_FILE)  # it appears locked
            yield records_dir


def _kill_orphans(records_dir: Path) -> None:
    """Kill workers that were stopped and therefore survived their supervisor."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or just ended
            if process.environ().get(RECORDS_DIR_ENV) == str(records_dir):
                process.kill()
