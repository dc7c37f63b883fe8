"""Steps that a run repeats after a rewind or a restart, and the time they took.

Rows of repeated steps are removed from metrics.jsonl. Their time is summed up first and recorded in
the event of the rewind or restart.
"""

from collections.abc import Iterable

from hlat.tracking.row_validation import Row, is_finite_number

START_EVENTS = ("start", "resume")
"""Events that start an attempt; their step is its first step."""
SUPERVISOR_EVENTS = ("restart", "give_up")
"""Events of the supervisor after the end of an attempt, which are no activity of the attempt."""
END_EVENTS = ("finish", "interrupt", "diverge", "fail")
"""Events of a planned end of an attempt."""
SCORE_EVENT = "score"
"""Event of an evaluation outside the run, at any time; it does not belong to an attempt."""
STALL_KEYS = {
    "evaluate": "seconds",
    "samples": "seconds",
    "checkpoint": "stall_seconds",
    "checkpoint_failed": "stall_seconds",
}
"""Events that interrupt training, with the key of their duration in seconds."""


def is_finished(events: Iterable[Row]) -> bool:
    """Return True if the last attempt of a run has trained and saved its last step."""
    bounds = [row["event"] for row in events if row["event"] in (*START_EVENTS, *END_EVENTS)]
    return bounds[-1:] == ["finish"]


def compute_steps_per_row(
    steps: Iterable[float],
    attempts: Iterable[float],
    events: Iterable[Row],
    after: int = 0,
) -> list[float]:
    """Return the number of steps that each row of metrics.jsonl averages over.

    `steps` and `attempts` are columns in file order, and `after` is the last step before the first
    row. `events` contain the first step of each attempt.
    """
    last_steps = {
        event.get("attempt"): max(after, event["step"])
        for event in events
        if event["event"] in START_EVENTS
    }
    previous_in_file, num_steps = float(after), []
    for step, attempt in zip(steps, attempts, strict=True):
        num_steps.append(max(0.0, step - last_steps.get(attempt, previous_in_file)))
        last_steps[attempt] = previous_in_file = step
    return num_steps


def exclude_scores(rows: Iterable[Row]) -> list[Row]:
    """Return the rows written by the run itself."""
    return [row for row in rows if row.get("event") != SCORE_EVENT and "attempt" in row]


def exclude_rolled_back_events(events: Iterable[Row]) -> list[Row]:
    """Return the events without those at steps that were rolled back later."""
    remaining: list[Row] = []
    for event in events:
        if "lost_steps" in event:
            remaining = [earlier for earlier in remaining if earlier["step"] <= event["step"]]
        remaining.append(event)
    return remaining


def compute_attempt_seconds(rows: Iterable[Row]) -> float:
    """Return the total duration of all attempts, each from its `began` to its last row."""
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    for row in exclude_scores(rows):
        attempt = row["attempt"]
        if row.get("event") in START_EVENTS:
            start[attempt] = row.get("began") or row["time"]
        end[attempt] = max(row["time"], end.get(attempt, 0.0))
    return sum(max(0.0, end[attempt] - since) for attempt, since in start.items())


def find_events_after_last_attempt(events: list[Row]) -> list[Row]:
    """Return the supervisor and score events after the last event of an attempt."""
    external = (*SUPERVISOR_EVENTS, SCORE_EVENT)
    internal = [i for i, row in enumerate(events) if row["event"] not in external]
    return events[internal[-1] + 1 if internal else 0 :]


def get_stall_seconds(event: Row) -> float:
    """Return the duration in seconds for which an event interrupted training; 0 if unknown."""
    seconds = event.get(STALL_KEYS.get(event["event"], ""))
    return float(seconds) if is_finite_number(seconds) else 0.0


def compute_lost_work(removed_rows: list[Row], events: list[Row], step: int) -> Row:
    """Return the work lost by going back to `step`, as fields of an event.

    Returns:
        `lost_steps` and `lost_seconds`: the steps of `removed_rows`, and the evaluations and saves
        after `step`; `lost_by_attempt`: for each attempt that ran them, the `seconds`, and `until`
        and `last_step`, the Unix time and step of its last row.
    """
    by_attempt: dict[str, Row] = {}
    removed_rows = [row for row in removed_rows if "attempt" in row]
    steps, attempts = ([row[key] for row in removed_rows] for key in ("step", "attempt"))
    num_steps = [int(count) for count in compute_steps_per_row(steps, attempts, events, step)]
    for row, count in zip(removed_rows, num_steps, strict=True):
        entry = by_attempt.setdefault(str(row["attempt"]), {"seconds": 0.0})
        entry["seconds"] += count * row.get("step_seconds", 0.0)
        entry |= {"until": row["time"], "last_step": row["step"]}
    for event in exclude_rolled_back_events(events):
        if event["step"] > step and "attempt" in event and get_stall_seconds(event):
            entry = by_attempt.setdefault(str(event["attempt"]), {"seconds": 0.0})
            entry["seconds"] += get_stall_seconds(event)
    return {
        "lost_steps": sum(num_steps),
        "lost_seconds": sum(entry["seconds"] for entry in by_attempt.values()),
        "lost_by_attempt": by_attempt,
    }
