"""Progress of reads and writes in bytes: a bar on a terminal, one line per minute in a log."""

import os
import sys
import time

from tqdm import tqdm

from hlat.config.config_errors import escape_control_characters

LOG_INTERVAL_S = 60.0


def format_bytes(num_bytes: float) -> str:
    """Return a size in powers of 1000, such as `1.23GB`."""
    return str(tqdm.format_sizeof(num_bytes, "B"))


def print_line(line: str) -> None:
    """Print a line to stdout, above a progress bar if one is shown.

    If the reader has closed stdout (`| head`), redirect it to /dev/null.
    """
    try:
        tqdm.write(escape_control_characters(line))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressBar:
    """Progress bar on stderr for `total` bytes, `initial` of them done by an earlier attempt."""

    def __init__(self, label: str, total: int, initial: int = 0) -> None:
        self._label, self._total = label, total
        self._initial = self._num_done = initial
        self._start = self._last_printed = time.monotonic()
        self._bar = tqdm(
            total=total, initial=initial, desc=label, unit="B", unit_scale=True, disable=None
        )
        if self._bar.disable:
            resumed = f", {format_bytes(initial)} of them done" if initial else ""
            self._print(f"{format_bytes(total)}{resumed}")

    def add(self, num_bytes: int) -> None:
        """Add completed bytes."""
        self._num_done += num_bytes
        self._bar.update(num_bytes)
        now = time.monotonic()
        if self._bar.disable and now - self._last_printed >= LOG_INTERVAL_S:
            self._last_printed = now
            rate = max(1.0, (self._num_done - self._initial) / (now - self._start))
            minutes = (self._total - self._num_done) / rate / 60
            done, total = format_bytes(self._num_done), format_bytes(self._total)
            self._print(f"{done} of {total}, {format_bytes(rate)}/s, {minutes:.0f} min left")

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()

    def _print(self, status: str) -> None:
        print(f"{self._label}: {status}", file=sys.stderr, flush=True)
