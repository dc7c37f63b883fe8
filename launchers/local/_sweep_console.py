"""Console output of a sweep on this machine.

Runs of a sequential sweep write to the console. Concurrent runs write to log files, and the console
has one line for the start and the end of each, and on a terminal a status line.
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

from hlat.config.config_errors import ExitCode
from hlat.training_state import compute_total_steps

from .._sweep_points import SweepPoint

_PROGRESS_INTERVAL_S = 1.0
_MAX_ROW_BYTES = 4096
"""Upper bound on the size of a row of metrics.jsonl."""
_CLEAR_LINE = "\r\x1b[K"
_EXIT_DESCRIPTIONS: dict[int, str] = {
    ExitCode.CONFIGURATION: "invalid configuration",
    ExitCode.DIVERGED: "diverged",
    ExitCode.PREEMPTED: "interrupted",
}


@dataclass(frozen=True)
class SweepTask:
    """A point to run, with its index in the sweep; without a log it writes to the console."""

    number: int
    point: SweepPoint
    log: Path | None


class SweepConsole:
    """Progress of a sweep on the console."""

    def __init__(self) -> None:
        self._clear_line = _CLEAR_LINE if sys.stdout.isatty() else ""
        self._last_update = time.monotonic()

    def print_start(self, task: SweepTask) -> None:
        """Print the overrides of a point that starts."""
        log = "" if task.log is None else f"  (output: {task.log})"
        self._print_line(f"[{task.number}] {' '.join(task.point.overrides)}{log}")

    def print_end(self, task: SweepTask, exit_code: int, seconds: float) -> None:
        """Print the result of a point with a log file."""
        if task.log is None:
            return
        status, log = "finished", ""
        if exit_code:
            status = f"{_EXIT_DESCRIPTIONS.get(exit_code, 'failed')}, exit code {exit_code},"
            log = f"; see {task.log}"
        parts = [f"{status} after {seconds:.0f} s", *_format_progress(task.point)]
        self._print_line(f"[{task.number}] {', '.join(parts)}{log}")

    def print_progress(self, running: Sequence[SweepTask], num_waiting: int) -> None:
        """Update the status line of a terminal, at most once per second."""
        now = time.monotonic()
        logged = [task for task in running if task.log is not None]
        if not self._clear_line or not logged or now < self._last_update + _PROGRESS_INTERVAL_S:
            return
        self._last_update = now
        parts = [
            f"[{task.number}] {' '.join(_format_progress(task.point)) or 'starting'}"
            for task in logged
        ]
        line = "  ".join([*parts, f"{num_waiting} waiting"])
        print(self._clear_line + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)

    def _print_line(self, line: str) -> None:
        print(f"{self._clear_line}{line}", flush=True)


def _format_progress(point: SweepPoint) -> list[str]:
    """Return the last logged step and loss of a run; empty before the first logged step."""
    row = _read_last_row(point.run_dir / "metrics.jsonl")
    if row is None:
        return []
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
    return [f"step {row['step']}/{compute_total_steps(point.config)}", f"loss {loss}"]


def _read_last_row(path: Path) -> dict[str, Any] | None:
    """Return the last complete row of a JSONL file to which another process may append."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_ROW_BYTES))
        *_, last, _ = [b"", *file.read().split(b"\n")]
    with suppress(ValueError):  # empty or damaged
        return json.loads(last)
    return None
