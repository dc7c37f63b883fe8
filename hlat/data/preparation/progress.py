"""How far a long job is: a bar on a terminal, a line now and then in a log."""

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 60.0


def format_bytes(num_bytes: float) -> str:
    """A size as people say it, such as `1.23GB`; powers of 1000."""
    return str(tqdm.format_sizeof(num_bytes, "B"))


def tell(line: str) -> None:
    """Print a line to stdout, above a bar if there is one."""
    tqdm.write(line)


class Progress:
    """Bytes done of a job's total, on stderr."""

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        """Say that the job begins.

        Args:
            label: What is being done.
            total: Bytes of the whole job.
            done: Bytes that an earlier attempt has done.
        """
        self._label, self._total = label, total
        self._begun = self._done = done
        self._start = self._said = time.monotonic()
        self._bar = tqdm(
            total=total, initial=done, desc=label, unit="B", unit_scale=True, disable=None
        )
        if self._bar.disable:
            rest = f", {format_bytes(done)} of them done" if done else ""
            self._say(f"{format_bytes(total)}{rest}")

    def add(self, num_bytes: int) -> None:
        """Show that further bytes are done."""
        self._done += num_bytes
        self._bar.update(num_bytes)
        now = time.monotonic()
        if self._bar.disable and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            self._say(self._state(now - self._start))

    def set(self, num_bytes: int) -> None:
        """Show how many bytes are done since the beginning of this attempt."""
        self.add(self._begun + num_bytes - self._done)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()

    def _state(self, seconds: float) -> str:
        rate = max(1.0, (self._done - self._begun) / seconds)
        minutes = (self._total - self._done) / rate / 60
        done, total = format_bytes(self._done), format_bytes(self._total)
        return f"{done} of {total}, {format_bytes(rate)}/s, {minutes:.0f} min left"

    def _say(self, state: str) -> None:
        print(f"{self._label}: {state}", file=sys.stderr, flush=True)
