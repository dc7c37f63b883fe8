"""Tells on the console what becomes of the points of a sweep that run on this machine.

One at a time they tell themselves. Of several at once, whose output goes to files, it is told when
each starts and how it ends; on a terminal one more line, written again and again, says how far all
are.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.errors import Exit
from hlat.state import total_steps

from ._points import Point

_SECONDS_BETWEEN_LINES = 1.0
_LONGEST_ROW = 4096
"""Bytes at the end of metrics.jsonl in which there is a whole row."""
_CLEAR = "\r\x1b[K"
_ENDS: dict[int, str] = {
    Exit.CONFIGURATION: "refused",
    Exit.DIVERGED: "diverged",
    Exit.PREEMPTED: "interrupted",
}


@dataclass(frozen=True)
class Task:
    """A point that is to run.

    Attributes:
        number: Its number in the sweep.
        point: What runs.
        log: Where its output goes; None: to the console.
    """

    number: int
    point: Point
    log: Path | None


class Console:
    """What a user sees."""

    def __init__(self) -> None:
        self._clear = _CLEAR if sys.stdout.isatty() else ""
        self._told = time.monotonic()

    def starts(self, task: Task) -> None:
        """Tell that a point starts."""
        words = f"[{task.number}] {' '.join(task.point.overrides)}"
        self._say(words if task.log is None else f"{words}  (its output: {task.log})")

    def ends(self, task: Task, code: int, seconds: float) -> None:
        """Tell how a point has ended that could not tell it itself."""
        if task.log is None:
            return
        how = f"{_ENDS.get(code, 'failed')}, exit code {code}," if code else "finished"
        why = f"; see {task.log}" if code else ""
        parts = [f"{how} after {seconds:.0f} s", *_reached(task.point)]
        self._say(f"[{task.number}] {', '.join(parts)}{why}")

    def progress(self, running: Sequence[Task], waiting: int) -> None:
        """Tell a terminal how far those are that run, but not all the time."""
        now = time.monotonic()
        shared = [task for task in running if task.log is not None]
        if not self._clear or not shared or now < self._told + _SECONDS_BETWEEN_LINES:
            return
        self._told = now
        parts = [f"[{task.number}] {' '.join(_reached(task.point)) or 'starts'}" for task in shared]
        line = "  ".join([*parts, f"{waiting} wait"])
        print(self._clear + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)

    def _say(self, line: str) -> None:
        print(f"{self._clear}{line}", flush=True)


def _reached(point: Point) -> list[str]:
    """Where a run is, or was when it ended; nothing where it has logged no step."""
    row = _last_row(point.folder / "metrics.jsonl")
    if row is None:
        return []
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
    return [f"step {row['step']}/{total_steps(point.config)}", f"loss {loss}"]


def _last_row(path: Path) -> dict[str, Any] | None:
    """The last whole row of a journal that another process may be writing."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LONGEST_ROW))
        *_, last, _ = [b"", *file.read().split(b"\n")]
    with suppress(ValueError):  # there is none yet, or it is damaged
        return json.loads(last)
    return None
