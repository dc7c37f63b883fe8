"""Progress as a person sees it: a bar on a terminal, a line now and then in a log file."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from hlat.config.tracking import Console as Style
from hlat.tracking.listener import Beginning, Row

_LOGGER = logging.getLogger("hlat")
_SECONDS_BETWEEN_LINES = 10.0


class Console:
    """Shows the steps of a run.

    Args:
        style: How progress is shown.
    """

    def __init__(self, style: Style) -> None:
        self._as_bar = style is Style.bar or (style is Style.auto and sys.stderr.isatty())
        self._bar: tqdm[Any] | None = None
        self._warnings = _Warnings(self)

    def begin(self, beginning: Beginning) -> None:
        """Show where the attempt begins, and from now on what any part of hlat warns of."""
        self._total, self._first = beginning.total_steps, beginning.step
        if self._as_bar:
            total, done = self._total, self._first
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)
        self._started = time.monotonic()
        self._last_line = 0.0
        _LOGGER.addHandler(self._warnings)

    def row(self, row: Row) -> None:
        """Show one row of metrics.jsonl."""
        numbers = (
            f"loss {row['loss']:.4f}  grad_norm {row['grad_norm']:.3f}  "
            f"{row['tokens_per_second']:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(numbers, refresh=False)
            self._bar.update(row["step"] - self._bar.n)
        elif self._line_is_due(row["step"]):
            self._last_line = time.monotonic()
            left = _clock(self._seconds_left(row["step"]))
            tell(f"step {row['step']}/{self._total}  {numbers}  {left} left")

    def event(self, row: Row) -> None:
        """Nothing: who makes an event says what a person should know of it."""

    def rewind(self, step: int) -> None:
        """Show an earlier step again."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """Print a sentence above the bar."""
        if self._bar is not None:
            self._bar.clear()
        tell(text)
        if self._bar is not None:
            self._bar.refresh()

    def finish(self, summary: Mapping[str, float]) -> None:
        """Leave the bar as it stands, and warnings to whoever else prints them."""
        _LOGGER.removeHandler(self._warnings)
        if self._bar is not None:
            self._bar.close()

    def abandon(self) -> None:
        """As at the end."""
        self.finish({})

    def _line_is_due(self, step: int) -> bool:
        first, last = step <= self._first + 1, step >= self._total
        return first or last or time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES

    def _seconds_left(self, step: int) -> float:
        per_step = (time.monotonic() - self._started) / max(1, step - self._first)
        return per_step * (self._total - step)


class _Warnings(logging.Handler):
    """Shows what any part of hlat logs above the bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.say(f"{record.levelname}: {record.getMessage()}")


def tell(text: str) -> None:
    """Print a line; a reader who has left (`| head`) must not end a training run."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _clock(seconds: float) -> str:
    """Return "1:05" or "2:03:04"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
