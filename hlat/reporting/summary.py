"""The numbers one asks for first, each with its unit.

They are few on purpose: a reader who wants more finds the figures and files beside them.
"""

import math

import numpy as np

from hlat.recovery.goodput import ENDINGS
from hlat.reporting.record import Record, Row, number, numbers
from hlat.reporting.wording import UNKNOWN, anything, duration, exact, moment, percent, short, whole

_OWN_PLACE = {"time", "attempt", "step", "event"}
_IN_THE_LEDGER = {"began", "lost_by_attempt"}


def summary(record: Record) -> list[tuple[str, str]]:
    """Names and values of the summary table."""
    last = record.metrics[-1] if record.metrics else {}
    logged = record.column("time")
    events = [row for row in record.events if row["event"] != "score"]  # whenever that was
    times = [*logged[np.isfinite(logged)].tolist(), *_finite(events, "time")]
    logged_by = record.column("attempt")
    attempts = {*logged_by[np.isfinite(logged_by)].tolist(), *_finite(record.events, "attempt")}
    wait, step = (np.nansum(record.column(f"{key}_seconds")) for key in ("data_wait", "step"))
    share = float(100 * wait / step) if step else math.nan
    rows = [
        ("Steps", whole(number(last, "step"))),
        ("Tokens", _tokens(number(last, "tokens"))),
        ("Started (UTC)", moment(min(times, default=math.nan))),
        ("Wall time, first to last row", duration(max(times) - min(times)) if times else UNKNOWN),
        ("Tokens per second, median", whole(_median(record, "tokens_per_second"))),
        ("Model FLOP utilisation, median", percent(100 * _median(record, "mfu"))),
        ("Step time waiting for data", percent(share)),
        ("Final training loss (nats per token)", exact(number(last, "loss"))),
        ("Attempts", str(len(attempts) or UNKNOWN)),
        ("Uptime", percent(100 * record.lifetime.uptime)),
        ("Goodput", percent(100 * record.lifetime.goodput)),
        ("Ended", _ending(record)),
    ]
    if record.unreadable:
        rows.append(("Lines that could not be read", whole(record.unreadable)))
    return rows


def heldout(record: Record) -> list[tuple[str, ...]]:
    """Per source: name; loss at the first and last evaluation; bits per byte at both."""
    evaluations = list(record.evaluations.values())
    if not evaluations:
        return []
    loss, bits = (
        [numbers(row, key) for row in (evaluations[0], evaluations[-1])]
        for key in ("loss", "bits_per_byte")
    )
    names = sorted(
        {*loss[0], *loss[1], *bits[0], *bits[1]}, key=lambda name: (name == "mean", name)
    )
    return [
        (name, *(exact(values.get(name, math.nan)) for values in (*loss, *bits))) for name in names
    ]


def ledger(record: Record) -> list[tuple[str, ...]]:
    """Per phase and source: both names, tokens, share of the phase, documents, epochs."""
    rows: list[tuple[str, ...]] = []
    for stage in record.ledger:
        read = stage["sources"]
        total = sum(number(entry, "tokens") for entry in read.values())
        for name, entry in read.items():
            tokens = number(entry, "tokens")
            share = percent(100 * tokens / total) if total else UNKNOWN
            documents = whole(number(entry, "documents"))
            epochs = exact(number(entry, "epochs"))
            rows.append((stage["name"], name, whole(tokens), share, documents, epochs))
    return rows


def timeline(record: Record) -> list[tuple[str, ...]]:
    """Per event: UTC time, attempt, step, name, and everything else that its row holds."""
    return [
        (
            moment(number(row, "time")),
            anything(row.get("attempt")),
            whole(row["step"]),
            anything(row.get("event")),
            _details(row),
        )
        for row in record.events
        if row.get("event") != "ledger"  # a table of its own
    ]


def _finite(rows: list[Row], key: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := number(row, key))]


def _median(record: Record, key: str) -> float:
    values = record.column(key)
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.nan


def _tokens(value: float) -> str:
    return f"{whole(value)} ({short(value)})" if value >= 1e4 else whole(value)


def state(record: Record) -> str:
    """How the newest attempt ended, in a word; in two if nothing says that it has."""
    ends = [row for row in record.last_attempt if row.get("event") in ENDINGS]
    return anything(ends[-1]["event"]) if ends else "running or killed"


def _ending(record: Record) -> str:
    ends = [row for row in record.last_attempt if row.get("event") in ENDINGS]
    if not ends:
        return "no end is recorded: it still runs, or was killed"
    return "; ".join(filter(None, [anything(ends[-1].get("event")), _details(ends[-1])]))


def _details(row: Row) -> str:
    told = [key for key in row if key not in _OWN_PLACE | _IN_THE_LEDGER]
    return "; ".join(f"{key}: {anything(row[key])}" for key in told)
