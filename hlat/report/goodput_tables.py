"""Tables and text about the wall time of a run by category, and its goodput."""

from hlat.recovery.goodput import TIME_CATEGORIES, AttemptTime, TimeLedger
from hlat.report.text_format import (
    UNKNOWN,
    format_decimal,
    format_duration,
    format_percent,
    format_timestamp,
)

TIME_CATEGORY_LABELS = {
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
ATTEMPT_HEADERS = ("Attempt", "Start (UTC)", "Wall time", *TIME_CATEGORY_LABELS.values())


def get_seconds_by_category(entry: AttemptTime | TimeLedger) -> dict[str, float]:
    """Return the seconds of an attempt or a run by category, including unaccounted time."""
    return {**entry.seconds, "unaccounted": entry.unaccounted_seconds}


def build_time_table(ledger: TimeLedger) -> list[tuple[str, ...]]:
    """Return category, time, share of the wall time and meaning; the last row is the sum."""
    meanings = {**TIME_CATEGORIES, "unaccounted": "time that was not measured"}
    wall = ledger.wall_seconds
    rows = [
        (
            TIME_CATEGORY_LABELS[category],
            _format_seconds(seconds),
            _format_fraction(seconds, wall),
            meanings[category],
        )
        for category, seconds in get_seconds_by_category(ledger).items()
    ]
    return [*rows, ("Wall time", format_duration(wall), _format_fraction(wall, wall), "")]


def build_attempt_table(ledger: TimeLedger) -> list[tuple[str, ...]]:
    """Return number, start time (UTC), wall time and time by category of each attempt."""
    return [
        (
            str(attempt.number),
            format_timestamp(attempt.start_time),
            format_duration(attempt.wall_seconds),
            *map(_format_seconds, get_seconds_by_category(attempt).values()),
        )
        for attempt in ledger.attempts
    ]


def format_goodput_summary(ledger: TimeLedger) -> str:
    """Return uptime and goodput in one line; empty without attempts."""
    if not ledger.attempts:
        return ""
    lost, down = (format_duration(ledger.seconds[category]) for category in ("lost", "down"))
    number = len(ledger.attempts)
    return (
        f"uptime {format_percent(100 * ledger.uptime)}, "
        f"goodput {format_percent(100 * ledger.goodput)} over "
        f"{number} attempt{'s' * (number > 1)}; {lost} lost, {down} down"
    )


def format_accounting_note(ledger: TimeLedger) -> str:
    """Return a sentence on the difference between the categories and the wall time."""
    if ledger.is_fully_accounted:
        return "The categories add up to the wall time within 0.5% (or 50 ms)."
    return (
        "The categories do not add up to the wall time: the clock was changed, the machine was "
        "suspended, or the run is older than the time accounting."
    )


def _format_seconds(seconds: float) -> str:
    """Return a duration rounded to milliseconds, the precision of the clock; never -0."""
    return format_duration(round(seconds, 3) + 0.0)


def _format_fraction(seconds: float, wall_seconds: float) -> str:
    if not wall_seconds:
        return UNKNOWN
    return f"{format_decimal(100 * seconds / wall_seconds)} %"
