"""A JSON lines file that survives killed processes and full disks.

A killed process can leave a partial line, which the next append removes; readers only skip it, as
another process may still be writing it. A row that cannot be written stays in memory and is written
with the next one, so training continues with a full disk. Rows are flushed to disk with each
checkpoint and every `SYNC_INTERVAL_S`, so no power failure removes a row of a step in a checkpoint.
"""

import errno
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.storage.durable_files import fsync_file, replace_file
from hlat.tracking.row_validation import Row, is_event_row, is_metrics_row

SYNC_INTERVAL_S = 30.0
"""Maximum time between flushes to disk while rows are appended."""
_TAIL_BYTES = 1 << 16
"""Bytes at the end of a file that contain the last row, unless it is longer."""
_APPEND_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


def open_metrics_log(run_dir: Path) -> "JsonlLog":
    """Return the log of metrics in a run directory."""
    return JsonlLog(run_dir / "metrics.jsonl", is_metrics_row)


def open_events_log(run_dir: Path) -> "JsonlLog":
    """Return the log of events in a run directory."""
    return JsonlLog(run_dir / "events.jsonl", is_event_row)


class JsonlLog:
    """Append-only JSON lines file at `path`; rows for which `is_valid` is False are damaged."""

    def __init__(self, path: Path, is_valid: Callable[[Row], bool] = lambda _: True) -> None:
        self.path = path
        self._is_valid = is_valid
        self._buffer = b""
        self._last_sync = time.monotonic()
        self._warned = self._ends_with_newline = False

    def validate_access(self) -> None:
        """Raise ConfigError if the file exists and cannot be read and written."""
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            os.close(os.open(self.path, os.O_RDWR | os.O_NOFOLLOW))
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be read and written ({error.strerror}); correct its "
                "permissions, or move it away"
            ) from error

    def append(self, row: Row) -> None:
        """Write a row, or buffer it until the next call if the write fails.

        Numbers that are not finite are written as null, which JSON requires.
        """
        self._buffer += json.dumps(replace_non_finite(row), allow_nan=False).encode() + b"\n"
        try:
            self._remove_partial_line()
            self._flush()
        except OSError as error:
            self._warn(f"cannot write {self.path}: {error.strerror}; training continues")
        if time.monotonic() - self._last_sync >= SYNC_INTERVAL_S:
            self.sync()

    def sync(self) -> None:
        """Flush the file to disk; print a warning if this fails."""
        self._last_sync = time.monotonic()
        try:
            if self.path.exists():
                fsync_file(self.path)
        except OSError as error:
            self._warn(f"cannot flush {self.path} to disk: {error.strerror}; training continues")

    def read_rows(self) -> list[Row]:
        """Return all complete rows; skip damaged lines with a warning."""
        rows, num_damaged = self._parse_lines()
        if num_damaged:
            self._warn(f"skipping a damaged line of {self.path}")
        return rows

    def repair(self) -> tuple[int, int]:
        """Remove damaged lines, and all rows of a step but the last, durably.

        Returns:
            The numbers of removed lines and rows.
        """
        rows, num_damaged = self._parse_lines()
        unique = {row["step"]: row for row in rows}
        num_duplicates = len(rows) - len(unique)
        if num_damaged or num_duplicates:
            self._replace_rows([row for row in rows if unique[row["step"]] is row])
        return num_damaged, num_duplicates

    def read_last_row(self) -> Row | None:
        """Return the last complete row without reading the rows before it; None without a row."""
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        if lines and (row := self._parse_line(lines[-1])) is not None:
            return row
        rows = self.read_rows()
        return rows[-1] if rows else None

    def truncate_after(self, last_step: int) -> list[Row]:
        """Remove the rows after `last_step` and return them."""
        rows = self.read_rows()
        removed = [row for row in rows if row["step"] > last_step]
        if removed:
            self._replace_rows([row for row in rows if row["step"] <= last_step])
        return removed

    def _parse_lines(self) -> tuple[list[Row], int]:
        """Return the complete rows, and the number of damaged lines."""
        if not self.path.exists():
            return [], 0
        lines = self.path.read_bytes().split(b"\n")[:-1]
        rows = [row for line in lines if (row := self._parse_line(line)) is not None]
        return rows, len(lines) - len(rows)

    def _parse_line(self, line: bytes) -> Row | None:
        try:
            row = json.loads(line)
        except (RecursionError, ValueError):
            return None
        return row if isinstance(row, dict) and self._is_valid(row) else None

    def _remove_partial_line(self) -> None:
        if self._ends_with_newline:
            return
        if self.path.exists() and self._read_last_byte() not in (b"", b"\n"):
            self._replace_rows(self.read_rows())
        self._ends_with_newline = True

    def _read_last_byte(self) -> bytes:
        """Return the last byte; the log of a sweep is opened again for each of its points."""
        with open(self.path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            return file.read()

    def _flush(self) -> None:
        descriptor = os.open(self.path, _APPEND_FLAGS, 0o666)
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
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        replace_file(self.path, content, durable=True)

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

    def repair(self) -> tuple[int, int]:
        """Change nothing."""
        return 0, 0

    def sync(self) -> None:
        """Do nothing."""


def replace_non_finite(value: Any) -> Any:
    """Return a value for JSON in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
