"""Console output of a sweep on this machine.

The runs write to log files. The console has one line for the start and the end of each, and on a
terminal a status line. A single run writes to the console.
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

from hlat.config.config_errors import ExitCode, escape_control_characters
from hlat.config.run_steps import compute_total_steps
from hlat.tracking.text_format import format_duration

from .._sweep_points import SweepPoint, find_shared_overrides, format_swept
from ._sweep_time_left import SweepTimeLeft

_PROGRESS_INTERVAL_S = 1.0
_FILE_INTERVAL_S = 600.0
"""Seconds without a line after which a file gets a status line."""
_NUM_LOG_LINES = 3
"""Lines of the log of a failed point that the console shows."""
_MAX_ROW_BYTES = 4096
"""Upper bound on the size of a row of metrics.jsonl."""
_CLEAR_LINE = "\r\x1b[K"
_EXIT_DESCRIPTIONS: dict[int, str] = {
    ExitCode.CONFIGURATION: "invalid configuration",
    ExitCode.DIVERGED: "diverged",
    ExitCode.PREEMPTED: "interrupted",
}
_EXPECTED_EXITS = (ExitCode.DIVERGED, ExitCode.PREEMPTED)


@dataclass(frozen=True)
class SweepTask:
    """A point to run, with its index in the sweep; without a log it writes to the console."""

    number: int
    point: SweepPoint
    log: Path | None


class SweepConsole:
    """Progress of a sweep on the console.

    Args:
        tasks: All points that this console displays.
        num_points: Points of the whole sweep; a search displays a part of them at a time.
    """

    def __init__(self, tasks: Sequence[SweepTask], num_points: int) -> None:
        self._num_points = num_points
        shared = find_shared_overrides([task.point.overrides for task in tasks])
        self._overrides = {
            task.number: format_swept(task.point.overrides, shared) for task in tasks
        }
        is_complete = num_points <= 1 + max(task.number for task in tasks)
        self._time_left = SweepTimeLeft([task.point for task in tasks]) if is_complete else None
        self._is_terminal = sys.stdout.isatty()
        self._clear_line = _CLEAR_LINE if self._is_terminal else ""
        self._last_update = self._last_print = time.monotonic()

    def print_start(self, task: SweepTask) -> None:
        """Print the overrides of a point that starts."""
        log = "" if task.log is None else f"  (output: {task.log})"
        self._print_line(f"{self._format_number(task)} {self._overrides[task.number]}{log}")
        if self._time_left is not None:
            step = _get_step(_read_last_row(task.point))
            self._time_left.start_point(task.point, step, time.monotonic())

    def print_end(self, task: SweepTask, exit_code: int, seconds: float) -> None:
        """Print the result of a point with a log file, and of a failed one the end of its log."""
        if self._time_left is not None:
            step = _get_step(_read_last_row(task.point))
            self._time_left.update(task.point, step, time.monotonic())
            self._time_left.end_point(task.point)
        if task.log is None:
            return
        status, lines = "finished", []
        if exit_code:
            status = f"{_EXIT_DESCRIPTIONS.get(exit_code, 'failed')}, exit code {exit_code},"
            lines = [] if exit_code in _EXPECTED_EXITS else _read_last_lines(task.log)
        parts = [f"{status} after {seconds:.0f} s", *_format_progress(task.point)]
        log = f"; see {task.log}" if exit_code else self._format_time_left("; ")
        self._print_line(f"{self._format_number(task)} {', '.join(parts)}{log}")
        for line in lines:
            self._print_line(f"    {line}")

    def omit(self, task: SweepTask, reason: str) -> None:
        """Print that a point will not be trained."""
        if self._time_left is not None:
            self._time_left.end_point(task.point)
        overrides = self._overrides[task.number]
        self._print_line(f"{self._format_number(task)} {overrides}: not trained, {reason}")

    def print_progress(self, running: Sequence[SweepTask], num_waiting: int) -> None:
        """Update the status line of a terminal each second; in a file, add one at long intervals.

        Without log files, the runs themselves write to the console.
        """
        now = time.monotonic()
        logged = [task for task in running if task.log is not None]
        if not logged or now < self._last_update + _PROGRESS_INTERVAL_S:
            return
        self._last_update = now
        if self._time_left is not None:
            for task in logged:
                self._time_left.update(task.point, _get_step(_read_last_row(task.point)), now)
        parts = [
            f"{self._format_number(task)} {' '.join(_format_progress(task.point)) or 'starting'}"
            for task in logged
        ]
        line = "  ".join([*parts, f"{num_waiting} waiting{self._format_time_left(', ')}"])
        if self._is_terminal:
            line = line[: shutil.get_terminal_size().columns - 1]
            print(self._clear_line + line, end="", flush=True)
        elif now >= self._last_print + _FILE_INTERVAL_S:
            self._print_line(line)

    def _format_number(self, task: SweepTask) -> str:
        return f"[{task.number + 1} of {self._num_points}]"

    def _format_time_left(self, separator: str) -> str:
        seconds = None if self._time_left is None else self._time_left.estimate()
        if not seconds:
            return ""
        return f"{separator}{format_duration(round(seconds))} left for the sweep"

    def _print_line(self, line: str) -> None:
        self._last_print = time.monotonic()
        print(f"{self._clear_line}{line}", flush=True)


def _get_step(row: dict[str, Any] | None) -> int:
    return 0 if row is None else int(row["step"])


def _read_last_lines(path: Path) -> list[str]:
    """Return the last lines of a log that are not empty."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_ROW_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [escape_control_characters(line) for line in lines if line.strip()][-_NUM_LOG_LINES:]


def _format_progress(point: SweepPoint) -> list[str]:
    """Return the last logged step and loss of a run; empty before the first logged step."""
    row = _read_last_row(point)
    if row is None:
        return []
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
    return [f"step {row['step']}/{compute_total_steps(point.config)}", f"loss {loss}"]


def _read_last_row(point: SweepPoint) -> dict[str, Any] | None:
    """Return the last complete row of metrics.jsonl, to which another process may append."""
    path = point.run_dir / "metrics.jsonl"
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_ROW_BYTES))
        *_, last, _ = [b"", *file.read().split(b"\n")]
    with suppress(ValueError):  # empty or damaged
        return json.loads(last)
    return None
