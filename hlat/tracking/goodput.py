"""Goodput and uptime of a run, from the start of its first attempt to the last logged activity.

    goodput = time of the surviving steps / wall        uptime = 1 - down / wall

Each category is measured separately and read from metrics.jsonl and events.jsonl. Time that no
category measures is reported as unaccounted.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from hlat.tracking.lost_work import (
    END_EVENTS,
    START_EVENTS,
    SUPERVISOR_EVENTS,
    compute_steps_per_row,
    exclude_rolled_back_events,
    get_stall_seconds,
)
from hlat.tracking.row_validation import Row, is_finite_number

TIME_CATEGORIES = {
    "startup": "process start to the first step: imports, building the model, opening the data,"
    " loading a checkpoint",
    "preflight": "checks of nodes and devices",
    "compile": "time of the first row of an attempt above its later rows: compilation and warm-up",
    "steps": "steps whose results are in the run",
    "data_wait": "steps waiting for their batch",
    "evaluation": "evaluation on held-out text",
    "checkpoint": "training paused for a save",
    "lost": "steps that were repeated, with their evaluations and saves; rollbacks; work after the"
    " last row until the end of the attempt was detected",
    "down": "no attempt was running, except after the last step or a Ctrl-C",
}
"""Categories of time and their descriptions, in the order of an attempt."""
METRIC_COLUMNS = ("step", "attempt", "time", "step_seconds", "data_wait_seconds")
"""Required columns of metrics.jsonl."""
_TOLERANCE_FRACTION, _TOLERANCE_S = 0.005, 0.05
_EMPTY_ROWS = {key: np.empty(0) for key in (*METRIC_COLUMNS, "covered", "train_seconds")}


@dataclass(frozen=True)
class AttemptTime:
    """Time of one attempt and of the gap after it, in seconds by `TIME_CATEGORIES`.

    `number` counts from 1, `start_time` is Unix time, and the wall time ends when the next attempt
    starts, or at the last activity before a finish, a Ctrl-C or the end of the record.
    """

    number: int
    start_time: float
    wall_seconds: float
    seconds: dict[str, float]

    @property
    def unaccounted_seconds(self) -> float:
        """Seconds in no category; negative if some are counted twice."""
        return self.wall_seconds - sum(self.seconds.values())


@dataclass(frozen=True)
class TimeLedger:
    """Time of a run by attempt."""

    attempts: tuple[AttemptTime, ...]

    @property
    def wall_seconds(self) -> float:
        """Wall time of the run."""
        return sum(attempt.wall_seconds for attempt in self.attempts)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by category, for all of `TIME_CATEGORIES`."""
        return {
            key: sum(attempt.seconds[key] for attempt in self.attempts) for key in TIME_CATEGORIES
        }

    @property
    def unaccounted_seconds(self) -> float:
        """Seconds in no category."""
        return sum(attempt.unaccounted_seconds for attempt in self.attempts)

    @property
    def goodput(self) -> float:
        """Fraction of the wall time in surviving steps; NaN for a wall time of 0."""
        return self._fraction_of_wall(self.seconds["steps"])

    @property
    def uptime(self) -> float:
        """Fraction of the wall time with a running attempt, as in the HLAT paper, section IV-B.

        The paper gives no definition. Start-up and the repetition of lost steps count as up.
        """
        return 1 - self._fraction_of_wall(self.seconds["down"])

    @property
    def is_fully_accounted(self) -> bool:
        """True if the unaccounted time is at most 0.5% of the wall time, or 50 ms in a short run.

        Positive and negative errors of attempts do not cancel.
        """
        error = sum(abs(attempt.unaccounted_seconds) for attempt in self.attempts)
        return error <= max(_TOLERANCE_FRACTION * self.wall_seconds, _TOLERANCE_S)

    def _fraction_of_wall(self, seconds: float) -> float:
        return seconds / self.wall_seconds if self.wall_seconds else math.nan


def build_time_ledger(
    metrics: Mapping[str, NDArray[np.float64]], events: Iterable[Row]
) -> TimeLedger:
    """Attribute every second of a run to a category, from rows of metrics.jsonl and events.jsonl.

    The durations of attempts and gaps come from the time of day, all other seconds from a monotonic
    clock. A gap is at least 0 if the time of day was set back. The time after a finish or a Ctrl-C
    is not part of the run. Rows with a NaN are dropped.
    """
    events = [row for row in events if _is_numeric(row, "step", "time") and "event" in row]
    records = _drop_idle_attempts(_build_attempt_records(metrics, events))
    warm_steps = [record.rows["train_seconds"][1:] for _, record in records]
    typical = _compute_median(np.concatenate(warm_steps) if warm_steps else np.empty(0))
    attempts = []
    for (number, record), following in zip_longest(records, records[1:]):
        start, end = record.start_time, record.end_time
        is_down = following is not None and not record.was_stopped_by_user
        gap = max(0.0, following[1].start_time - end) if following and is_down else 0.0
        seconds = record.compute_seconds(typical, is_followed=following is not None)
        attempts.append(AttemptTime(number, start, end - start + gap, {**seconds, "down": gap}))
    return TimeLedger(tuple(attempts))


@dataclass
class _AttemptRecord:
    """Logged rows and events of one attempt.

    Attributes:
        rows: Surviving rows of metrics.jsonl as columns; `covered` is the number of steps of each
            row, `train_seconds` their mean time without data wait.
        stall_seconds: By event, seconds of evaluations and saves that no rollback or later attempt
            went back behind.
        lost_seconds: Seconds of rows, evaluations and saves that did not survive.
        last_lost_row: Time and step of the last row that did not survive; None without one.
        noticed_time: Time at which the supervisor detected the end; None without an event.
    """

    rows: dict[str, NDArray[np.float64]] = field(default_factory=lambda: _EMPTY_ROWS)
    events: list[Row] = field(default_factory=list)
    stall_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lost_seconds: float = 0.0
    last_lost_row: tuple[float, int] | None = None
    noticed_time: float | None = None

    @property
    def start_time(self) -> float:
        """Unix time of the start, or of the first activity if it was not logged."""
        logged = [row["began"] for row in self.events if _is_numeric(row, "began")]
        return float(logged[0]) if logged else min(self._activity_times)

    @property
    def end_time(self) -> float:
        """Unix time of the last activity, or of the detection of an unplanned end."""
        noticed = [] if self.noticed_time is None or self.has_ended else [self.noticed_time]
        return max([*self._activity_times, *noticed])

    @property
    def has_ended(self) -> bool:
        """True after a planned end."""
        return any(row["event"] in END_EVENTS for row in self.events)

    @property
    def was_stopped_by_user(self) -> bool:
        """True after the last step or a Ctrl-C: a later attempt extends the run."""
        ends = [row for row in self.events if row["event"] in ("finish", "interrupt")]
        return any(row["event"] == "finish" or row.get("signal") == "SIGINT" for row in ends)

    def compute_seconds(self, typical_step_seconds: float, is_followed: bool) -> dict[str, float]:
        """Return the seconds by category, except `down`.

        Args:
            typical_step_seconds: Seconds per step for an attempt with a single row.
            is_followed: True if there is a later attempt.
        """
        covered, train_seconds = self.rows["covered"], self.rows["train_seconds"]
        warm_seconds = _compute_median(train_seconds[1:], default=typical_step_seconds)
        compilation = 0.0
        if len(train_seconds) and not math.isnan(warm_seconds):
            compilation = max(0.0, float((train_seconds[0] - warm_seconds) * covered[0]))
        startup = self._ready_time - self.start_time
        preflight = min(startup, self._sum_event_seconds("preflight"))
        lost = self.lost_seconds + self._sum_event_seconds("rewind")
        if not self.has_ended and (is_followed or self.noticed_time is not None):
            lost += self._compute_unlogged_seconds()
        stalls = self.stall_seconds
        return {
            "startup": startup - preflight,
            "preflight": preflight,
            "compile": compilation,
            "steps": float(covered @ train_seconds) - compilation,
            "data_wait": float(covered @ self.rows["data_wait_seconds"]),
            "evaluation": stalls["evaluate"] + stalls["samples"],
            "checkpoint": stalls["checkpoint"] + stalls["checkpoint_failed"],
            "lost": lost,
        }

    @property
    def _activity_times(self) -> list[float]:
        lost = [] if self.last_lost_row is None else [self.last_lost_row[0]]
        return [*self.rows["time"].tolist(), *(row["time"] for row in self.events), *lost]

    @property
    def _ready_time(self) -> float:
        """Time before the first step, or after restoring if there is no step."""
        times = [row["time"] for row in self.events if row["event"] in (*START_EVENTS, "ready")]
        return float(times[-1]) if times else self.start_time

    def _compute_unlogged_seconds(self) -> float:
        """Return the seconds of work after the last row of an attempt without a planned end."""
        rows = [*zip(self.rows["time"].tolist(), self.rows["step"].tolist(), strict=True)]
        rows += [] if self.last_lost_row is None else [self.last_lost_row]
        since, step = max(rows, default=(self._ready_time, -1))
        later = [row for row in self.events if row["time"] >= since and row["step"] >= step]
        return max(0.0, self.end_time - since - sum(map(get_stall_seconds, later)))

    def _sum_event_seconds(self, name: str) -> float:
        """Sum the `seconds` of this attempt's events; earlier ones are of an attempt that died."""
        rows = [row for row in self.events if row["event"] == name and _is_numeric(row, "seconds")]
        return sum(float(row["seconds"]) for row in rows if row["time"] >= self.start_time)


def _build_attempt_records(
    metrics: Mapping[str, NDArray[np.float64]], events: list[Row]
) -> list[tuple[int, _AttemptRecord]]:
    """Group rows and events by attempt; return the numbers of the attempts and their records."""
    records = defaultdict[int, _AttemptRecord](_AttemptRecord)
    for number, rows in _split_rows_by_attempt(metrics, events).items():
        records[number].rows = rows
    newest = None
    for event in events:
        if event["event"] in SUPERVISOR_EVENTS:
            if newest is not None and records[newest].noticed_time is None:
                records[newest].noticed_time = event["time"]
        elif _is_numeric(event, "attempt"):
            newest = event["attempt"] if event["event"] in START_EVENTS else newest
            records[event["attempt"]].events.append(event)
        for name, lost in event.get("lost_by_attempt", {}).items():
            record = records[int(name)]
            record.lost_seconds += lost["seconds"]
            if "until" in lost:
                row = (lost["until"], lost["last_step"])
                record.last_lost_row = max(record.last_lost_row or row, row)
    for event in exclude_rolled_back_events(events):
        if _is_numeric(event, "attempt"):
            records[event["attempt"]].stall_seconds[event["event"]] += get_stall_seconds(event)
    return [item for item in sorted(records.items()) if len(item[1].rows["step"]) or item[1].events]


def _split_rows_by_attempt(
    metrics: Mapping[str, NDArray[np.float64]], events: list[Row]
) -> dict[int, dict[str, NDArray[np.float64]]]:
    """Return the complete rows of each attempt as columns, with the steps that each covers."""
    complete = np.flatnonzero(np.all([np.isfinite(metrics[key]) for key in METRIC_COLUMNS], axis=0))
    rows = {key: metrics[key][complete] for key in METRIC_COLUMNS}
    rows["covered"] = np.array(compute_steps_per_row(rows["step"], rows["attempt"], events))
    rows["train_seconds"] = rows["step_seconds"] - rows["data_wait_seconds"]
    return {
        int(number): {key: column[rows["attempt"] == number] for key, column in rows.items()}
        for number in np.unique(rows["attempt"])
    }


def _drop_idle_attempts(
    records: list[tuple[int, _AttemptRecord]],
) -> list[tuple[int, _AttemptRecord]]:
    """Drop attempts without steps after the end of a finished run."""
    for i, (_, record) in enumerate(records):
        is_finished = any(row["event"] == "finish" for row in record.events)
        if is_finished and not any(len(later.rows["step"]) for _, later in records[i + 1 :]):
            return records[: i + 1]
    return records


def _compute_median(seconds: NDArray[np.float64], default: float = math.nan) -> float:
    return float(np.median(seconds)) if len(seconds) else default


def _is_numeric(row: Row, *keys: str) -> bool:
    return all(is_finite_number(row.get(key)) for key in keys)
