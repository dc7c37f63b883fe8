"""Progress on the console: a tqdm bar on a terminal, periodic lines in a log file."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from hlat.config.tracking import ConsoleStyle
from hlat.tracking.metric_logger import MetricLogger, Row, RunInfo

_LOGGER = logging.getLogger("hlat")
_LINE_INTERVAL_S = 10.0


class ConsoleLogger(MetricLogger):
    """Progress display of a run.

    Events are not displayed: their source prints a message if the user needs one.
    """

    def __init__(self, style: ConsoleStyle) -> None:
        is_terminal = style is ConsoleStyle.auto and sys.stderr.isatty()
        self._use_bar = style is ConsoleStyle.bar or is_terminal
        self._bar: tqdm[Any] | None = None
        self._warning_handler = _WarningHandler(self)

    def start(self, run_info: RunInfo) -> None:
        """Display the first step and the warnings of the logger "hlat" from now on."""
        self._total_steps, self._first_step = run_info.total_steps, run_info.step
        if self._use_bar:
            total, initial = self._total_steps, self._first_step
            self._bar = tqdm(total=total, initial=initial, unit="step", dynamic_ncols=True)
        self._start_time = time.monotonic()
        self._last_line_time = 0.0
        _LOGGER.addHandler(self._warning_handler)

    def log_metrics(self, row: Row) -> None:
        """Display a row of metrics.jsonl."""
        step = row["step"]
        metrics = (
            f"loss {row['loss']:.4f}  grad_norm {row['grad_norm']:.3f}  "
            f"{row['tokens_per_second']:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(metrics, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._is_line_due(step):
            self._last_line_time = time.monotonic()
            remaining = _format_clock(self._estimate_seconds_left(step))
            print_line(f"step {step}/{self._total_steps}  {metrics}  {remaining} left")

    def rewind(self, step: int) -> None:
        """Set the bar back to `step`."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def print_message(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print_line(text)
        if self._bar is not None:
            self._bar.refresh()

    def finish(self, summary: Mapping[str, float]) -> None:
        """Close the bar and stop displaying warnings."""
        _LOGGER.removeHandler(self._warning_handler)
        if self._bar is not None:
            self._bar.close()

    def _is_line_due(self, step: int) -> bool:
        first, last = step <= self._first_step + 1, step >= self._total_steps
        return first or last or time.monotonic() - self._last_line_time >= _LINE_INTERVAL_S

    def _estimate_seconds_left(self, step: int) -> float:
        per_step = (time.monotonic() - self._start_time) / max(1, step - self._first_step)
        return per_step * (self._total_steps - step)


class _WarningHandler(logging.Handler):
    """Handler that prints log records above the bar."""

    def __init__(self, console: ConsoleLogger) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print_message(f"{record.levelname}: {record.getMessage()}")


def print_line(text: str) -> None:
    """Print a line; redirect stdout to /dev/null if its reader has closed it (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _format_clock(seconds: float) -> str:
    """Return "1:05" or "2:03:04"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
