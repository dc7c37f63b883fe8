"""The record of a run: a row per logged step, a row per event, shown as they are written.

Rows are the run's memory: reports, resumption and the console all read from them. Services, if a
run names any, are told of each row once it is written.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hlat import hardware
from hlat.config.run import Config
from hlat.config.told import told
from hlat.model.canonical import flops_per_token
from hlat.state import total_steps
from hlat.tracking import provenance, replay, services, totals
from hlat.tracking.beginning import attempt_began
from hlat.tracking.console import Console, tell
from hlat.tracking.journal import Journal, Nowhere
from hlat.tracking.listener import Beginning, Listener
from hlat.tracking.neuron_monitor import NeuronMonitor


class Tracker:
    """Writes metrics.jsonl and events.jsonl of one attempt at a run.

    Args:
        folder: The run folder.
        config: The run's configuration.
        chief: Whether this process writes the record; of the others it hears nothing.
        config_yaml: The configuration as it was composed, for services.

    Attributes:
        attempt: Its number, from 1.
        identity: What each service calls the run; known once the attempt has begun.
    """

    def __init__(
        self, folder: Path, config: Config, chief: bool = True, config_yaml: str = "{}"
    ) -> None:
        self._chief, self._folder, self._config_yaml = chief, folder, config_yaml
        journal = Journal if chief else Nowhere
        self._metrics = journal(folder / "metrics.jsonl")
        self._events = journal(folder / "events.jsonl")
        self._config = config
        self._flops_per_token = flops_per_token(config.model, config.batch.sequence_length)
        self._console: Console | None = None
        self._neuron: NeuronMonitor | None = None
        self._listeners: list[Listener] = []
        self.identity: dict[str, str] = {}
        self._paid_since = time.time()
        before = [row["event"] for row in self._events.rows()]
        self.attempt = 1 + sum(event in replay.BEGINNINGS for event in before)
        self._num_scores = before.count(replay.SCORE)
        self._last_step, self._last_time, self._waited = 0, time.perf_counter(), 0.0

    def begin(self, step: int, identity: Mapping[str, str] | None = None, **details: Any) -> None:
        """Open the attempt at `step`; rows beyond it will be written again.

        The event tells when the attempt `began`, and what it has to do again (`replay.lost`).

        Args:
            step: Where the run goes on.
            identity: What each service calls the run, as its checkpoint has it.
            details: What else the event tells.
        """
        before, dropped = self._events.rows(), self._metrics.keep(step)
        earlier = [row for row in replay.own((*before, *dropped)) if row["attempt"] < self.attempt]
        began = attempt_began(max((row["time"] for row in earlier), default=None))
        lost = replay.lost(dropped, before, step) if earlier else {}
        alive = replay.seconds_alive((*before, *self._metrics.rows(), *dropped))
        self._paid_since = began - alive
        if self._chief:
            self._console = Console(self._config.tracking.console)
            self._open_services(step, identity or {}, replay.written_between(before))
            self._neuron = NeuronMonitor()
        self.event("resume" if step else "start", step, began=began, **lost, **details)
        self.restart_clock(step)

    def ready(self, step: int) -> None:
        """Record that all is there for the first step after `step`; what comes now is training."""
        self.event("ready", step)
        self.restart_clock(step)

    def wait(self, seconds: float) -> None:
        """Count the time that a step waited for its batch."""
        self._waited += seconds

    def log(self, step: int, phase: str, **numbers: float | None) -> None:
        """Write the row of `step`; times are means over the steps since the last row."""
        steps, waited = step - self._last_step, self._waited
        seconds = self.restart_clock(step) / steps
        tokens_per_second = self._config.batch.tokens_per_step / seconds
        row = {
            "step": step,
            "tokens": step * self._config.batch.tokens_per_step,
            **numbers,
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds,
            "data_wait_seconds": waited / steps,
            "mfu": self._mfu(tokens_per_second),
            **self._cost(step * self._config.batch.tokens_per_step),
            **(self._neuron.newest() if self._neuron else {}),
            "phase": phase,
            "attempt": self.attempt,
            "time": time.time(),
        }
        self._metrics.append(row)
        for listener in self._listeners:
            listener.row(row)

    def rewind(self, step: int) -> None:
        """Go back to `step` within the attempt; rows beyond it will be written again.

        The event tells the `seconds` since the last row, and what is done again (`replay.lost`).
        """
        lost = replay.lost(self._metrics.keep(step), self._events.rows(), step)
        for listener in self._listeners:
            listener.rewind(step)
        self.event("rewind", step, seconds=self.restart_clock(step), **lost)

    def recent(self, count: int) -> list[dict[str, Any]]:
        """Return the last `count` rows, oldest first."""
        return self._metrics.rows()[-count:]

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return such events of all attempts, oldest first."""
        return [row for row in self._events.rows() if row["event"] == event]

    def event(self, event: str, step: int, **details: Any) -> None:
        """Write one row of events.jsonl."""
        place = {"step": step, "attempt": self.attempt, "time": time.time()}
        row = {"event": event, **place, **details}
        self._events.append(row)
        for listener in self._listeners:
            listener.event(row)
        self._tell_scores()

    def _tell_scores(self) -> None:
        """Let services hear of what others have measured of this run since the last event."""
        if self._listeners:
            scores = self.events(replay.SCORE)
            for row in scores[self._num_scores :]:
                for listener in self._listeners:
                    listener.event(row)
            self._num_scores = len(scores)

    def say(self, text: str) -> None:
        """Tell the user something without breaking the progress bar."""
        if self._console is not None:
            self._console.say(text)
        elif self._chief:
            tell(text)

    def leave_out(self, since: float) -> float:
        """Do not count what happened since then as training; return the seconds it took.

        Args:
            since: What time.perf_counter() returned before it.
        """
        seconds = time.perf_counter() - since
        self._last_time += seconds
        return seconds

    def restart_clock(self, step: int) -> float:
        """Time the steps after `step` from here on; return the seconds since the last restart."""
        now = time.perf_counter()
        seconds = now - self._last_time
        self._last_step, self._last_time, self._waited = step, now, 0.0
        return seconds

    def close(self) -> None:
        """End the progress display, and let services finish."""
        if self._neuron is not None:
            self._neuron.close()
            self._neuron = None
        if self._listeners:
            summary = totals.totals(self._metrics.rows(), self._events.rows())
            for listener in reversed(self._listeners):  # the console shows what the others warn of
                listener.finish(summary)
            self._listeners = []

    def _open_services(
        self, step: int, identity: Mapping[str, str], missed: Iterable[dict[str, Any]]
    ) -> None:
        """Let the console and all services begin, and tell them what a supervisor wrote."""
        config = self._config
        services.refuse_missing(config)
        self.identity = services.identities(config, self._folder, identity)
        made = services.listeners(config, self.say)
        assert self._console is not None, "it hears of everything first"
        for name, listener in {"console": self._console, **made}.items():
            self._listeners.append(listener)
            listener.begin(
                Beginning(
                    folder=self._folder,
                    name=self._folder.name,
                    identity=self.identity.get(name, ""),
                    attempt=self.attempt,
                    step=step,
                    total_steps=total_steps(config),
                    config=told(self._config_yaml) if made else {},
                    code_revision=provenance.revision() if made else None,
                )
            )
            for row in missed:
                listener.event(row)

    def _cost(self, tokens: int) -> dict[str, float | None]:
        """What all nodes have cost while an attempt was alive, and that per 4 million tokens."""
        seconds = time.time() - self._paid_since
        cpt = hardware.cost_per_4m_tokens(self._config.hardware, tokens / seconds)
        return {"cost_usd": None if cpt is None else cpt * tokens / 4e6, "cpt_usd": cpt}

    def _mfu(self, tokens_per_second: float) -> float | None:
        config = self._config
        return hardware.mfu(
            tokens_per_second,
            self._flops_per_token,
            config.hardware,
            config.num_processes,
            config.precision.compute,
        )
