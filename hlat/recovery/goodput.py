"""Where the time of a run went, from the start of its first attempt to its last sign of life.

    goodput = time of the steps that survived / wall        uptime = 1 - down / wall

Each kind of time is measured where it passes and read from the record. None is what the others
leave over, so that time which nobody measured shows up as unaccounted instead of as something else.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.tracking.replay import BEGINNINGS, blocked_seconds, standing, steps_covered

Row = dict[str, Any]

KINDS = {
    "startup": "from the start of the process until the first step could run: imports, building"
    " the model, opening the data, restoring a checkpoint",
    "preflight": "checks of the machine before it is trusted",
    "compile": "what the first row of an attempt took longer than its later rows: compilation and"
    " warm-up",
    "steps": "steps whose results are in the run",
    "data_wait": "steps that waited for their batch",
    "evaluation": "measuring held-out text",
    "checkpoint": "training stood still for a save",
    "lost": "steps that had to be run again, with their evaluations and saves; going back to them;"
    " work after the last row until somebody noticed that it had ended",
    "down": "nobody was running",
}
"""The kinds of time, in the order in which an attempt goes through them, and what they mean."""
COLUMNS = ("step", "attempt", "time", "step_seconds", "data_wait_seconds")
"""What the ledger reads of metrics.jsonl."""
NOTICED = {"restart", "give_up"}
"""Events of who noticed that an attempt had ended; no signs of life of the attempt itself."""
ENDINGS = {"finish", "interrupt", "diverge", "fail"}
"""Events with which an attempt ends of its own accord."""
_SHARE, _SECONDS = 0.005, 0.05
_PREFLIGHT = "preflight"
_NO_ROWS = {key: np.empty(0) for key in (*COLUMNS, "covered")}


@dataclass(frozen=True)
class Attempt:
    """The time of one attempt, and of the gap after it.

    Attributes:
        number: As in the record, from 1.
        began: Unix time.
        wall: Seconds until the next attempt began, or until the last sign of life of the run.
        seconds: What they were spent on, by kind; all of `KINDS`.
    """

    number: int
    began: float
    wall: float
    seconds: dict[str, float]

    @property
    def unaccounted(self) -> float:
        """Seconds that no kind has claimed; below 0 if some were claimed twice."""
        return self.wall - sum(self.seconds.values())


@dataclass(frozen=True)
class Ledger:
    """The time of a run, attempt by attempt."""

    attempts: tuple[Attempt, ...]

    @property
    def wall(self) -> float:
        """Seconds of the run's life."""
        return sum(attempt.wall for attempt in self.attempts)

    @property
    def seconds(self) -> dict[str, float]:
        """What they were spent on, by kind; all of `KINDS`."""
        return {kind: sum(one.seconds[kind] for one in self.attempts) for kind in KINDS}

    @property
    def unaccounted(self) -> float:
        """Seconds that no kind has claimed."""
        return sum(attempt.unaccounted for attempt in self.attempts)

    @property
    def goodput(self) -> float:
        """Share of the wall time in steps that survived; NaN of a run without a second."""
        return self._share(self.seconds["steps"])

    @property
    def uptime(self) -> float:
        """Share of the wall time in which somebody was running, as in the HLAT paper, section IV-B.

        The paper gives no definition. An attempt that starts up, or repeats what was lost, is up.
        """
        return 1 - self._share(self.seconds["down"])

    @property
    def is_closed(self) -> bool:
        """Whether all but 0.5% of the wall time, or 50 ms of a short run, is accounted for.

        What one attempt lacks and another has too much does not cancel out.
        """
        error = sum(abs(attempt.unaccounted) for attempt in self.attempts)
        return error <= max(_SHARE * self.wall, _SECONDS)

    def _share(self, seconds: float) -> float:
        return seconds / self.wall if self.wall else math.nan


def ledger(metrics: Mapping[str, NDArray[np.float64]], events: Iterable[Row]) -> Ledger:
    """Attribute every second of a run.

    Times of day tell how long an attempt and the gap after it were, all other seconds come from a
    clock that nobody can set. A gap is never shorter than nothing, should the time have been set
    back meanwhile.

    Args:
        metrics: The `COLUMNS` of metrics.jsonl, NaN where a row lacks a number; such rows are left
            out.
        events: Rows of events.jsonl.
    """
    told = [row for row in events if _has(row, "step", "time") and "event" in row]
    traces = _life(_traces(metrics, told))
    later = [trace.later_steps for trace in traces]
    typical = _typical(np.concatenate(later) if later else np.empty(0))
    attempts = []
    for trace, following in zip_longest(traces, traces[1:]):
        gap = 0.0 if following is None else max(0.0, following.began - trace.ends)
        wall = trace.ends - trace.began + gap
        seconds = trace.seconds(typical, over=following is not None) | {"down": gap}
        attempts.append(Attempt(trace.number, trace.began, wall, {k: seconds[k] for k in KINDS}))
    return Ledger(tuple(attempts))


@dataclass
class _Trace:
    """What the record holds of one attempt.

    Attributes:
        number: From 1.
        rows: Its rows of metrics.jsonl that survived: their `COLUMNS`, and how many steps each has
            `covered`.
        events: Its rows of events.jsonl.
        stands: Those among them that no later attempt went back behind.
        lost: Seconds of its rows, evaluations and saves that did not survive.
        last_row: Time and step of the last row that did not survive; None: all did.
        noticed: When somebody noticed that it had ended; None: nobody told.
    """

    number: int
    rows: dict[str, NDArray[np.float64]]
    events: list[Row]
    stands: list[Row]
    lost: float = 0.0
    last_row: tuple[float, int] | None = None
    noticed: float | None = None

    @property
    def began(self) -> float:
        """Unix time; of a record without it, that of the first sign of life."""
        told = [row["began"] for row in self.events if _has(row, "began")]
        return float(told[0]) if told else min(self._signs)

    @property
    def ends(self) -> float:
        """Unix time of the last sign of life, or when its absence was noticed."""
        if self.noticed is None or self.ended:
            return max(self._signs)
        return max(*self._signs, self.noticed)

    @property
    def ended(self) -> bool:
        """Whether it came to an end of its own accord."""
        return any(row["event"] in ENDINGS for row in self.events)

    @property
    def later_steps(self) -> NDArray[np.float64]:
        """Seconds of a step, without waiting for data, of all rows but the first."""
        return self._trained[1:]

    def seconds(self, typical: float, over: bool) -> dict[str, float]:
        """Return the seconds by kind, but for `down`.

        Args:
            typical: Seconds of a step that does not wait, for an attempt that has no later rows.
            over: Whether another attempt has followed.
        """
        waited = float(self.rows["covered"] @ self.rows["data_wait_seconds"])
        trained = float(self.rows["covered"] @ self._trained)
        compiled = self._first_row_excess(typical)
        startup = self._ready - self.began
        preflight = min(startup, self._seconds_of(_PREFLIGHT))
        return {
            "startup": startup - preflight,
            "preflight": preflight,
            "compile": compiled,
            "steps": trained - compiled,
            "data_wait": waited,
            "evaluation": self._blocked("evaluate"),
            "checkpoint": self._blocked("checkpoint", "checkpoint_failed"),
            "lost": self.lost
            + self._seconds_of("rewind")
            + (self._tail if over or self.noticed is not None else 0.0),
        }

    @property
    def _trained(self) -> NDArray[np.float64]:
        return self.rows["step_seconds"] - self.rows["data_wait_seconds"]

    @property
    def _signs(self) -> list[float]:
        gone = [] if self.last_row is None else [self.last_row[0]]
        times = self.rows["time"]
        logged = [float(times.min()), float(times.max())] if len(times) else []
        return [*logged, *(row["time"] for row in self.events), *gone]

    @property
    def _ready(self) -> float:
        """When the first step could run; of an attempt that came less far, when it had restored."""
        times = [row["time"] for row in self.events if row["event"] in (*BEGINNINGS, "ready")]
        return float(times[-1]) if times else self.began

    @property
    def _tail(self) -> float:
        """Seconds of work after the last row of an attempt that did not end of its own accord."""
        if self.ended:
            return 0.0
        newest = np.lexsort((self.rows["step"], self.rows["time"]))[-1:]
        rows = [(float(self.rows["time"][i]), float(self.rows["step"][i])) for i in newest]
        rows += [] if self.last_row is None else [self.last_row]
        since, step = max(rows, default=(self._ready, -1))
        later = [row for row in self.events if row["time"] >= since and row["step"] >= step]
        known = sum(map(blocked_seconds, later))
        return max(0.0, self.ends - float(since) - known)

    def _first_row_excess(self, typical: float) -> float:
        own = _typical(self.later_steps, otherwise=typical)
        if not len(self._trained) or math.isnan(own):
            return 0.0
        return max(0.0, float((self._trained[0] - own) * self.rows["covered"][0]))

    def _blocked(self, *names: str) -> float:
        return sum(blocked_seconds(row) for row in self.stands if row["event"] in names)

    def _seconds_of(self, name: str) -> float:
        """Seconds of this attempt's events; one that died before it began has left some as well."""
        told = [row for row in self.events if row["event"] == name and _has(row, "seconds")]
        return sum(float(row["seconds"]) for row in told if row["time"] >= self.began)


def _traces(metrics: Mapping[str, NDArray[np.float64]], events: list[Row]) -> list[_Trace]:
    """Sort the record by attempt."""
    rows = _by_attempt(metrics, events)
    traces = defaultdict[int, _Trace](lambda: _Trace(0, _NO_ROWS, [], []))
    for number, own in rows.items():
        traces[number].rows = own
    stands = {id(event) for event in standing(events)}
    newest = None
    for event in events:
        if event["event"] in NOTICED:
            if newest is not None and traces[newest].noticed is None:
                traces[newest].noticed = event["time"]
        elif _has(event, "attempt"):
            newest = event["attempt"] if event["event"] in BEGINNINGS else newest
            traces[event["attempt"]].events.append(event)
            if id(event) in stands:
                traces[event["attempt"]].stands.append(event)
    _add_lost(traces, events)
    for number, trace in traces.items():
        trace.number = number
    return [trace for _, trace in sorted(traces.items()) if len(trace.rows["step"]) or trace.events]


def _by_attempt(
    metrics: Mapping[str, NDArray[np.float64]], events: list[Row]
) -> dict[int, dict[str, NDArray[np.float64]]]:
    """Return for each attempt the columns of its whole rows, with how many steps each covers."""
    whole = np.flatnonzero(np.all([np.isfinite(metrics[key]) for key in COLUMNS], axis=0))
    rows = {key: metrics[key][whole] for key in COLUMNS}
    rows["covered"] = steps_covered(rows["step"], rows["attempt"], events)
    order = np.argsort(rows["attempt"], kind="stable")
    numbers, starts = np.unique(rows["attempt"][order], return_index=True)
    parts = np.split(order, starts[1:])
    return {
        int(number): {key: column[part] for key, column in rows.items()}
        for number, part in zip(numbers, parts, strict=False)
    }


def _add_lost(traces: dict[int, _Trace], events: list[Row]) -> None:
    for event in events:
        for name, entry in event.get("lost_by_attempt", {}).items():
            trace = traces[int(name)]
            trace.lost += entry["seconds"]
            if "until" in entry:
                last = (entry["until"], entry["last_step"])
                trace.last_row = max(trace.last_row or last, last)


def _life(traces: list[_Trace]) -> list[_Trace]:
    """Leave out attempts at a finished run that found nothing to do: its life was over."""
    finished = next(
        (
            number
            for number, trace in enumerate(traces)
            if any(row["event"] == "finish" for row in trace.events)
            and not any(len(later.rows["step"]) for later in traces[number + 1 :])
        ),
        len(traces),
    )
    return traces[: finished + 1]


def _typical(seconds: NDArray[np.float64], otherwise: float = math.nan) -> float:
    return float(np.median(seconds)) if len(seconds) else otherwise


def _has(row: Row, *keys: str) -> bool:
    return all(isinstance(row.get(key), int | float) and math.isfinite(row[key]) for key in keys)
