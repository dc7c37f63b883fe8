"""A JSON lines file that survives killed processes and full disks.

A killed process can leave a partial line, which the next append removes; readers only skip it, as
another process may still be writing it. A row that cannot be written stays in memory and is written
with the next one, so training continues with a full disk.
"""

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, TypeGuard

from hlat.tracking.run_directory import replace_file

Row = dict[str, Any]


class JsonlLog:
    """Append-only JSON lines file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = b""
        self._warned = self._ends_with_newline = False

    def append(self, row: Row) -> None:
        """Write a row, or buffer it until the next call if the write fails.

        Numbers that are not finite are written as null, which JSON requires.
        """
        self._buffer += json.dumps(_replace_non_finite(row), allow_nan=False).encode() + b"\n"
        try:
            self._remove_partial_line()
            self._flush()
        except OSError as error:
            self._warn(f"cannot write {self.path}: {error.strerror}; training continues")

    def read_rows(self) -> list[Row]:
        """Return all complete rows; skip damaged lines with a warning."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_bytes().split(b"\n")[:-1]:
            try:
                rows.append(json.loads(line))
            except (RecursionError, ValueError):
                self._warn(f"skipping a damaged line of {self.path}")
        return rows

    def truncate_after(self, last_step: int) -> list[Row]:
        """Remove the rows after `last_step` and return them."""
        rows = self.read_rows()
        removed = [row for row in rows if row["step"] > last_step]
        if removed:
            self._replace_rows([row for row in rows if row["step"] <= last_step])
        return removed

    def _remove_partial_line(self) -> None:
        if self._ends_with_newline:
            return
        if self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n"):
            self._replace_rows(self.read_rows())
        self._ends_with_newline = True

    def _flush(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, self._buffer) < len(self._buffer):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        self._buffer = b""

    def _replace_rows(self, rows: list[Row]) -> None:
        replace_file(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def _warn(self, message: str) -> None:
        if not self._warned:
            print(f"hlat: {message}", file=sys.stderr)
        self._warned = True


class NullLog(JsonlLog):
    """Log of ranks other than 0: discards all rows."""

    def append(self, row: Row) -> None:
        """Discard the row."""

    def read_rows(self) -> list[Row]:
        """Return an empty list."""
        return []


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Return True for a finite int or float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
