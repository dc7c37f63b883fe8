"""What a run will do again, and how long it took the first time.

Rows of steps that are run again leave the record, so that it reads as if nothing had happened. The
time they took has passed all the same: it is summed up here before they go.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]

BEGINNINGS = ("start", "resume")
"""Events that open an attempt; their step is the one it goes on from."""
_SUPERVISORS = ("restart", "give_up")
SCORE = "score"
"""Event of an evaluation beside the run, whenever that was; no sign of life of any attempt."""
BLOCKED = {
    "evaluate": "seconds",
    "checkpoint": "stall_seconds",
    "checkpoint_failed": "stall_seconds",
}
"""Events during which no step was run, and where they hold the seconds."""


def steps_covered(
    steps: NDArray[np.float64],
    attempts: NDArray[np.float64],
    events: Iterable[Row],
    after: int = 0,
) -> NDArray[np.float64]:
    """Return for each row of metrics.jsonl how many steps its means are over.

    Args:
        steps: Of each row, in the order of the file.
        attempts: Of each row.
        events: Rows of events.jsonl; they hold the steps at which attempts began.
        after: The last step that lies before all of the rows.
    """
    began = {
        event.get("attempt"): max(after, event["step"])
        for event in events
        if event["event"] in BEGINNINGS
    }
    before = np.concatenate([[after], steps[:-1]])  # of the row above, whosever it is
    order = np.argsort(attempts, kind="stable")
    own = np.concatenate([[after], steps[order][:-1]])
    is_first = np.diff(attempts[order], prepend=np.nan) != 0
    for place in np.flatnonzero(is_first):
        row = order[place]
        own[place] = began.get(int(attempts[row]), before[row])
    covered = np.empty_like(steps)
    covered[order] = np.maximum(0, steps[order] - own)
    return covered


def own(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that the run itself has written."""
    return [row for row in rows if row.get("event") != SCORE]


def standing(events: Iterable[Row]) -> list[Row]:
    """Return the events that no later attempt has gone back behind."""
    kept: list[Row] = []
    for event in events:
        if "lost_steps" in event:
            kept = [earlier for earlier in kept if earlier["step"] <= event["step"]]
        kept.append(event)
    return kept


def seconds_alive(rows: Iterable[Row]) -> float:
    """Return how long attempts have lasted, each from when it `began` to its last sign of life.

    Args:
        rows: Rows of metrics.jsonl and of events.jsonl, in any order.
    """
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for row in own(rows):
        attempt = row["attempt"]
        if row.get("event") in BEGINNINGS:
            began[attempt] = row.get("began") or row["time"]
        ended[attempt] = max(row["time"], ended.get(attempt, 0.0))
    return sum(max(0.0, ended[attempt] - since) for attempt, since in began.items())


def written_between(events: list[Row]) -> list[Row]:
    """Return the last events of all that others have written since the last attempt ended."""
    others = (*_SUPERVISORS, SCORE)
    last = [i for i, row in enumerate(events) if row["event"] not in others]
    return events[last[-1] + 1 if last else 0 :]


def blocked_seconds(event: Row) -> float:
    """Return how long training stood still for an event; 0 if it does not say so."""
    seconds = event.get(BLOCKED.get(event["event"], ""))
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return 0.0
    return float(seconds)


def lost(dropped: list[Row], events: list[Row], step: int) -> Row:
    """Return what an event that goes back to `step` tells of the time that this costs.

    Args:
        dropped: The rows of metrics.jsonl beyond `step`.
        events: All events before this one.
        step: Where the run goes on.

    Returns:
        `lost_steps` and `lost_seconds`, which count the steps of `dropped` and the evaluations and
        saves beyond `step`; `lost_by_attempt`, for each attempt that ran them, the `seconds`, and
        the Unix time and step of its last row, `until` and `last_step`.
    """
    by_attempt: dict[str, Row] = {}
    steps, attempts = (
        np.array([row[key] for row in dropped], dtype=np.float64) for key in ("step", "attempt")
    )
    covered = steps_covered(steps, attempts, events, step).astype(int).tolist()
    for row, count in zip(dropped, covered, strict=True):
        entry = by_attempt.setdefault(str(row["attempt"]), {"seconds": 0.0})
        entry["seconds"] += count * row["step_seconds"]
        entry |= {"until": row["time"], "last_step": row["step"]}
    for event in standing(events):
        if event["step"] > step and blocked_seconds(event):
            entry = by_attempt.setdefault(str(event["attempt"]), {"seconds": 0.0})
            entry["seconds"] += blocked_seconds(event)
    return {
        "lost_steps": sum(covered),
        "lost_seconds": sum(entry["seconds"] for entry in by_attempt.values()),
        "lost_by_attempt": by_attempt,
    }
