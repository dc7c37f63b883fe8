"""Where the time of a run went, in words: for the page, its figure and the console.

The numbers are the ledger's; here they get names, units and an order.
"""

import math

from hlat.recovery.goodput import KINDS, Attempt, Ledger
from hlat.reporting.wording import duration, exact, moment, percent

LABELS = {
    "startup": "Start-up",
    "preflight": "Pre-flight",
    "compile": "Compile and warm-up",
    "steps": "Steps that survived",
    "data_wait": "Data wait",
    "evaluation": "Evaluation",
    "checkpoint": "Checkpoint stall",
    "lost": "Lost work",
    "down": "Down",
    "unaccounted": "Unaccounted",
}
"""What people call the kinds of time."""
_NOT_MEASURED = "what nobody measured"


def spent(entry: Attempt | Ledger) -> dict[str, float]:
    """Seconds of an attempt or of the run by kind, with what is unaccounted."""
    return {**entry.seconds, "unaccounted": entry.unaccounted}


def table(ledger: Ledger) -> list[tuple[str, ...]]:
    """Per kind of time: name, time, share of the wall time, what it means; the sum last."""
    meanings = {**KINDS, "unaccounted": _NOT_MEASURED}
    rows = [
        (LABELS[kind], _time(seconds), _share(seconds, ledger.wall), meanings[kind])
        for kind, seconds in spent(ledger).items()
    ]
    return [*rows, ("Wall time", duration(ledger.wall), _share(ledger.wall, ledger.wall), "")]


def attempts(ledger: Ledger) -> list[tuple[str, ...]]:
    """Per attempt: number, when it began (UTC), wall time, and the time of each kind."""
    return [
        (
            str(attempt.number),
            moment(attempt.began),
            duration(attempt.wall),
            *map(_time, spent(attempt).values()),
        )
        for attempt in ledger.attempts
    ]


def sentence(ledger: Ledger) -> str:
    """Uptime and goodput in a line; empty if no attempt is recorded."""
    if not ledger.attempts:
        return ""
    lost, down = (duration(ledger.seconds[kind]) for kind in ("lost", "down"))
    number = len(ledger.attempts)
    return (
        f"uptime {percent(100 * ledger.uptime)}, goodput {percent(100 * ledger.goodput)} over "
        f"{number} attempt{'s' * (number > 1)}; {lost} lost, {down} down"
    )


def note(ledger: Ledger) -> str:
    """What a reader must know to trust the ledger."""
    if ledger.is_closed:
        return "The kinds of time add up to the wall time within 0.5% (or 50 ms)."
    return (
        "The kinds of time do not add up to the wall time: the clock was set, the machine "
        "suspended, or this run began before the ledger was kept."
    )


def _time(seconds: float) -> str:
    """Return a duration to the millisecond, below which a clock's own error lies; never -0."""
    return duration(round(seconds, 3) + 0.0)


def _share(seconds: float, wall: float) -> str:
    return f"{exact(100 * seconds / wall)} %" if wall else exact(math.nan)
