"""A file of JSON lines that survives kills and full disks.

A killed process can leave half a line and a full disk can refuse one. Half a line is cut off when the file is opened
again; a refused line is kept in memory and written with the next one, so training never stops for its log.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


class Journal:
    """Append-only JSON lines at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = ""
        self._warned = False
        rows = self.rows()
        self._rewrite(rows) if not self._ends_cleanly() else None

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, or keep it for the next call if the disk refuses it."""
        self._waiting += json.dumps(row) + "\n"
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                print(
                    f"hlat: cannot write {self.path}: {error.strerror}; training goes on",
                    file=sys.stderr,
                )
            self._warned = True

    def rows(self) -> list[dict[str, Any]]:
        """Return every whole row."""
        try:
            lines = self.path.read_text().split("\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[:-1] if line]

    def keep(self, last_step: int) -> None:
        """Drop the rows of steps after `last_step`: they will be run again."""
        rows = self.rows()
        kept = [row for row in rows if row["step"] <= last_step]
        if len(kept) < len(rows):
            self._rewrite(kept)

    def _write(self) -> None:
        with self.path.open("a") as file:
            size = file.seek(0, os.SEEK_END)
            try:
                file.write(self._waiting)
                file.flush()
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise
        self._waiting = ""

    def _ends_cleanly(self) -> bool:
        return not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        replacement = self.path.with_name(f".{self.path.name}.tmp")
        replacement.write_text("".join(json.dumps(row) + "\n" for row in rows))
        replacement.replace(self.path)
