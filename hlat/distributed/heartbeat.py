"""Heartbeat of a worker in shared memory, which its supervisor checks."""

import mmap
import os
import struct
import time
from pathlib import Path

from hlat.distributed.rank_environment import RECORDS_DIR_ENV, read_rank_info

_DEADLINE_STRUCT = struct.Struct("d")
_HEARTBEAT_BYTES = _DEADLINE_STRUCT.size + 1


class Heartbeat:
    """Deadline of a worker in shared memory: the worker extends it, the supervisor checks it.

    The deadline is a time of the monotonic clock; 0 disables it. A byte follows it, which is 1 once
    the worker has started. A new file contains 0.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            if file.tell() < _HEARTBEAT_BYTES:
                file.write(bytes(_HEARTBEAT_BYTES))
                file.flush()
            self._memory = mmap.mmap(file.fileno(), _HEARTBEAT_BYTES)

    def set_deadline(self, seconds: float | None) -> None:
        """Set the deadline to `seconds` from now; None disables it."""
        deadline = 0.0 if seconds is None else time.monotonic() + seconds
        _DEADLINE_STRUCT.pack_into(self._memory, 0, deadline)

    def is_expired(self) -> bool:
        """Return True if the deadline has passed."""
        deadline: float = _DEADLINE_STRUCT.unpack_from(self._memory)[0]
        return 0 < deadline < time.monotonic()

    @property
    def has_started(self) -> bool:
        """True if the worker has trained a step, or has built its engine for another command."""
        return bool(self._memory[-1])

    @has_started.setter
    def has_started(self, value: bool) -> None:
        self._memory[-1] = value


def open_heartbeat() -> Heartbeat | None:
    """Return the heartbeat of this process; None without a supervisor."""
    if (records_dir := os.environ.get(RECORDS_DIR_ENV)) is None:
        return None
    return Heartbeat(get_heartbeat_path(Path(records_dir), read_rank_info().rank))


def record_start() -> None:
    """Record that this worker has started, for its supervisor."""
    if (heartbeat := open_heartbeat()) is not None:
        heartbeat.has_started = True


def get_heartbeat_path(records_dir: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return records_dir / f"{rank}.pulse"
