"""A file of JSON lines that survives kills and full disks.

A killed process can leave half a line and a full disk can refuse one. Half a line is cut off before
the next one is written, and by nobody who only reads: it may be on its way. A refused line is kept
in memory and written with the next one, so training never stops for its log.
"""

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any


class Journal:
    """Append-only JSON lines at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""
        self._warned = self._whole = False

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, or keep it for the next call if the disk refuses it.

        A number that is not finite becomes null: JSON has no other word for it.
        """
        self._waiting += json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        try:
            self._mend()
            self._write()
        except OSError as error:
            self._warn(f"cannot write {self.path}: {error.strerror}; training goes on")

    def rows(self) -> list[dict[str, Any]]:
        """Return every whole row; a damaged line is skipped."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_bytes().split(b"\n")[:-1]:
            try:
                rows.append(json.loads(line))
            except (RecursionError, ValueError):
                self._warn(f"{self.path} has a damaged line, which is skipped")
        return rows

    def keep(self, last_step: int) -> list[dict[str, Any]]:
        """Drop the rows of steps after `last_step`, which will be run again, and return them."""
        rows = self.rows()
        dropped = [row for row in rows if row["step"] > last_step]
        if dropped:
            self._rewrite([row for row in rows if row["step"] <= last_step])
        return dropped

    def _mend(self) -> None:
        """Cut off the half line that an earlier process has left."""
        if self._whole:
            return
        if self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n"):
            self._rewrite(self.rows())
        self._whole = True

    def _write(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, self._waiting) < len(self._waiting):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        self._waiting = b""

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        replacement = self.path.with_name(f".{self.path.name}.tmp")
        replacement.write_text("".join(json.dumps(row) + "\n" for row in rows))
        replacement.replace(self.path)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            print(f"hlat: {problem}", file=sys.stderr)
        self._warned = True


class Nowhere(Journal):
    """A journal that keeps nothing."""

    def append(self, row: dict[str, Any]) -> None:
        """Forget the row."""

    def rows(self) -> list[dict[str, Any]]:
        """There are none."""
        return []


def _finite(value: Any) -> Any:
    """Return `value` with null for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
