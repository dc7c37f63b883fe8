"""The wall time of a run by category: figure, tables and a line of text.

The figure has a bar for the run, and one for each attempt. All bars have the same length, so that
short attempts, which may show what failed, are visible. The duration of an attempt is part of its
label.
"""

from functools import partial

from hlat.figures.report_figure import INK, MUTED, SERIES, ReportFigure
from hlat.figures.share_bars import MIN_SHOWN_SHARE, Styles, draw_share_bars, format_shares
from hlat.tracking.goodput import TIME_CATEGORIES, AttemptTime, TimeLedger
from hlat.tracking.text_format import (
    UNKNOWN,
    format_decimal,
    format_duration,
    format_percent,
    format_timestamp,
)

FIGURE_NAME = "time"
"""File name without extension."""
MAX_ATTEMPTS = 12
"""Maximum number of attempts in the figure; the last ones are drawn."""
_STYLES: Styles = {
    "startup": ("Start-up", SERIES[3], None),
    "preflight": ("Pre-flight", SERIES[3], "////"),
    "compile": ("Compile and warm-up", SERIES[4], None),
    "steps": ("Steps that survived", SERIES[0], None),
    "data_wait": ("Data wait", SERIES[0], "////"),
    "evaluation": ("Evaluation", SERIES[2], "////"),
    "checkpoint": ("Checkpoint stall", SERIES[2], None),
    "lost": ("Lost work", SERIES[1], None),
    "down": ("Down", MUTED, None),
    "unaccounted": ("Unaccounted", INK, "...."),
}
"""Label, colour and hatching by category; related categories share a colour."""
_LABELS = {category: label for category, (label, *_) in _STYLES.items()}
ATTEMPT_HEADERS = ("Attempt", "Start (UTC)", "Wall time", *_LABELS.values())


def build_goodput_figure(ledger: TimeLedger) -> ReportFigure:
    """Return a figure of the wall time by category."""
    entries: list[AttemptTime | TimeLedger] = [ledger]
    if len(ledger.attempts) > 1:
        entries += ledger.attempts[-MAX_ATTEMPTS:]
    bars = [(_format_bar_label(entry), _compute_shares(entry)) for entry in entries]
    categories = [c for c in _STYLES if any(shares[c] > MIN_SHOWN_SHARE for _, shares in bars)]
    caption = _format_accounting_note(ledger)
    if len(ledger.attempts) > MAX_ATTEMPTS:
        caption = f"The last {MAX_ATTEMPTS} of {len(ledger.attempts)} attempts. {caption}"
    alt_text = (
        f"Wall time of {format_duration(ledger.wall_seconds)} by category: "
        f"{format_shares(_compute_shares(ledger), _STYLES)}."
    )
    draw = partial(draw_share_bars, bars, _STYLES, categories, "% of wall time")
    return ReportFigure(FIGURE_NAME, alt_text, draw, caption=caption)


def build_time_table(ledger: TimeLedger) -> list[tuple[str, ...]]:
    """Return category, time, share of the wall time and meaning; the last row is the sum."""
    meanings = {**TIME_CATEGORIES, "unaccounted": "time that was not measured"}
    wall = ledger.wall_seconds
    rows = [
        (
            _LABELS[category],
            _format_seconds(seconds),
            _format_fraction(seconds, wall),
            meanings[category],
        )
        for category, seconds in _get_seconds_by_category(ledger).items()
    ]
    return [*rows, ("Wall time", format_duration(wall), _format_fraction(wall, wall), "")]


def build_attempt_table(ledger: TimeLedger) -> list[tuple[str, ...]]:
    """Return number, start time (UTC), wall time and time by category of each attempt."""
    return [
        (
            str(attempt.number),
            format_timestamp(attempt.start_time),
            format_duration(attempt.wall_seconds),
            *map(_format_seconds, _get_seconds_by_category(attempt).values()),
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


def _format_bar_label(entry: AttemptTime | TimeLedger) -> str:
    name = "all" if isinstance(entry, TimeLedger) else f"attempt {entry.number}"
    return f"{name}, {format_duration(entry.wall_seconds)}"


def _compute_shares(entry: AttemptTime | TimeLedger) -> dict[str, float]:
    return {
        category: seconds / entry.wall_seconds if entry.wall_seconds else 0.0
        for category, seconds in _get_seconds_by_category(entry).items()
    }


def _get_seconds_by_category(entry: AttemptTime | TimeLedger) -> dict[str, float]:
    """Return the seconds of an attempt or a run by category, including unaccounted time."""
    return {**entry.seconds, "unaccounted": entry.unaccounted_seconds}


def _format_accounting_note(ledger: TimeLedger) -> str:
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
