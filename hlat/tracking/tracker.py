"""The record of a run: a row per logged step, a row per event, shown as they are written.

Rows are the run's memory: reports, resumption and the console all read from them.
"""

import time
from pathlib import Path
from typing import Any

from hlat import hardware
from hlat.config.run import Config
from hlat.model.canonical import flops_per_token
from hlat.state import total_steps
from hlat.tracking.console import Console, tell
from hlat.tracking.journal import Journal, Nowhere


class Tracker:
    """Writes metrics.jsonl and events.jsonl of one attempt at a run.

    Args:
        folder: The run folder.
        config: The run's configuration.
        chief: Whether this process writes the record; of the others it hears nothing.
    """

    def __init__(self, folder: Path, config: Config, chief: bool = True) -> None:
        self._chief = chief
        journal = Journal if chief else Nowhere
        self._metrics = journal(folder / "metrics.jsonl")
        self._events = journal(folder / "events.jsonl")
        self._config = config
        self._flops_per_token = flops_per_token(config.model, config.batch.sequence_length)
        self._console: Console | None = None
        self.attempt = 1 + sum(row["event"] in ("start", "resume") for row in self._events.rows())
        self.restart_clock(0)

    def begin(self, step: int, **details: Any) -> None:
        """Open the attempt at `step`; rows beyond it will be written again."""
        self._metrics.keep(step)
        self.event("resume" if step else "start", step, **details)
        if self._chief:
            self._console = Console(self._config.tracking.console, total_steps(self._config), step)
        self.restart_clock(step)

    def wait(self, seconds: float) -> None:
        """Count the time that a step waited for its batch."""
        self._waited += seconds

    def log(self, step: int, phase: str, **numbers: float | None) -> None:
        """Write the row of `step`; times are means over the steps since the last row."""
        steps = step - self._last_step
        seconds = (time.perf_counter() - self._last_time) / steps
        tokens_per_second = self._config.batch.tokens_per_step / seconds
        row = {
            "step": step,
            "tokens": step * self._config.batch.tokens_per_step,
            **numbers,
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds,
            "data_wait_seconds": self._waited / steps,
            "mfu": self._mfu(tokens_per_second),
            "phase": phase,
            "attempt": self.attempt,
            "time": time.time(),
        }
        self._metrics.append(row)
        if self._console is not None:
            self._console.step(row)
        self.restart_clock(step)

    def rewind(self, step: int) -> None:
        """Go back to `step` within the attempt; rows beyond it will be written again."""
        self._metrics.keep(step)
        if self._console is not None:
            self._console.rewind(step)
        self.restart_clock(step)

    def recent(self, count: int) -> list[dict[str, Any]]:
        """Return the last `count` rows, oldest first."""
        return self._metrics.rows()[-count:]

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return such events of all attempts, oldest first."""
        return [row for row in self._events.rows() if row["event"] == event]

    def event(self, event: str, step: int, **details: Any) -> None:
        """Write one row of events.jsonl."""
        self._events.append(
            {"event": event, "step": step, "attempt": self.attempt, "time": time.time(), **details}
        )

    def say(self, text: str) -> None:
        """Tell the user something without breaking the progress bar."""
        if self._console is not None:
            self._console.say(text)
        elif self._chief:
            tell(text)

    def restart_clock(self, step: int) -> None:
        """Time from here on, so that an evaluation or a save does not count as training."""
        self._last_step, self._last_time, self._waited = step, time.perf_counter(), 0.0

    def close(self) -> None:
        """End the progress display."""
        if self._console is not None:
            self._console.close()

    def _mfu(self, tokens_per_second: float) -> float | None:
        config = self._config
        return hardware.mfu(
            tokens_per_second,
            self._flops_per_token,
            config.hardware,
            config.num_processes,
            config.precision.compute,
        )
