"""Progress of a run on the console: a tqdm bar on a terminal, lines in a log file."""

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from tqdm import tqdm

from hlat.config.tracking import ConsoleStyle
from hlat.storage.progress_bar import print_line
from hlat.tracking.metric_logger import MetricLogger, RunInfo
from hlat.tracking.row_validation import Row

_LINE_INTERVAL_S = 10.0
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""Format of the bar; the time left in the postfix is ours, without that of the first steps."""
_MIN_STEPS = 5
"""Steps of an attempt before the first estimate of the time left."""
_NUM_RECENT = 25
"""Logged rows of which the time left takes the median."""


class ConsoleLogger(MetricLogger):
    """Progress display of a run, and of the warnings of the logger "hlat".

    Events are not displayed: their source prints a message if the user needs one.
    """

    def __init__(self, style: ConsoleStyle) -> None:
        is_terminal = style is ConsoleStyle.auto and sys.stderr.isatty()
        self._use_bar = style is ConsoleStyle.bar or is_terminal
        self._bar: tqdm[Any] | None = None

    def start(self, run_info: RunInfo) -> None:
        """Display the first step and warnings from now on."""
        total, first = run_info.total_steps, run_info.step
        self._total_steps, self._first_step = total, first
        self._time_left, self._last_line_time = TimeLeft(first, total), 0.0
        if self._use_bar:
            self._bar = tqdm(total=total, initial=first, dynamic_ncols=True, bar_format=_BAR_FORMAT)
        logging.getLogger("hlat").addHandler(_WARNING_HANDLER)

    def log_metrics(self, row: Row) -> None:
        """Display a row of metrics.jsonl."""
        step = row["step"]
        self._time_left.add_row(step, row["step_seconds"])
        metrics = (
            f"loss {row['loss']:.4f}  grad_norm {row['grad_norm']:.3f}  "
            f"{row['tokens_per_second']:,.0f} tokens/s"
        )
        if "router_max_violation" in row:
            metrics += f"  max violation {row['router_max_violation']:.2f}"
        if (seconds := self._time_left.estimate()) is not None:
            metrics += f"  {tqdm.format_interval(seconds)} left"
        if self._bar is not None:
            self._bar.set_postfix_str(metrics, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._is_line_due(step):
            self._last_line_time = time.monotonic()
            print_line(f"step {step}/{self._total_steps}  {metrics}")

    def rewind(self, step: int) -> None:
        """Set the bar back to `step`, and estimate the time left anew."""
        self._time_left = TimeLeft(step, self._total_steps)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def finish(self, summary: Mapping[str, float]) -> None:
        """Close the bar and stop displaying warnings."""
        logging.getLogger("hlat").removeHandler(_WARNING_HANDLER)
        if self._bar is not None:
            self._bar.close()

    def _is_line_due(self, step: int) -> bool:
        first, last = step <= self._first_step + 1, step >= self._total_steps
        return first or last or time.monotonic() - self._last_line_time >= _LINE_INTERVAL_S


class _WarningHandler(logging.Handler):
    """Handler that prints log records above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        print_line(f"{record.levelname}: {record.getMessage()}")


_WARNING_HANDLER = _WarningHandler(logging.WARNING)


class TimeLeft:
    """Estimator of the seconds that the remaining steps take, without those of the first row.

    The first row of an attempt contains compilation and allocation. A step is estimated as the
    median of recent rows, plus the measured time between steps, such as evaluations and saves.
    """

    def __init__(self, step: int, total_steps: int) -> None:
        self._start_step, self._last_step, self._total_steps = step, step, total_steps
        self._first_row: tuple[int, float] | None = None
        self._step_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        self._training_seconds = 0.0

    def add_row(self, step: int, step_seconds: float) -> None:
        """Add a logged row; `step_seconds` is the mean over the steps since the last one."""
        if self._first_row is None:
            self._first_row = step, time.monotonic()
        else:
            self._step_seconds.append(step_seconds)
            self._training_seconds += step_seconds * (step - self._last_step)
        self._last_step = step

    def estimate(self) -> float | None:
        """Return the seconds of the remaining steps; None before there is an estimate."""
        if self._first_row is None or not self._step_seconds:
            return None
        first_step, first_time = self._first_row
        if self._last_step < self._start_step + _MIN_STEPS:
            return None
        between = time.monotonic() - first_time - self._training_seconds
        per_step = median(self._step_seconds) + max(0.0, between) / (self._last_step - first_step)
        return per_step * (self._total_steps - self._last_step)
