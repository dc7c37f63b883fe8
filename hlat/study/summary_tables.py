"""Tables of a run: summary, held-out text, data and events."""

import math
from collections import Counter
from itertools import chain

import numpy as np

from hlat.study.run_record import Row, RunRecord, get_number, get_numbers
from hlat.tracking.heldout_rows import find_worse_sources, get_average_row, get_loop_row
from hlat.tracking.lost_work import END_EVENTS, exclude_scores
from hlat.tracking.text_format import (
    UNKNOWN,
    format_count,
    format_decimal,
    format_duration,
    format_percent,
    format_short,
    format_timestamp,
    format_value,
)

_POSITION_KEYS = {"time", "attempt", "step", "event"}
_EVENTS_WITH_TABLES = ("ledger", "samples")
"""Events that `build_data_table` and `build_sample_tables` show."""
_MAX_SAMPLES = 12
_HIDDEN_KEYS = {"began", "lost_by_attempt", "clusters", "loop"}
"""Fields of events that other parts of the report show."""
HELDOUT_HEADERS = ("Bits per byte", "Standard error", "Documents", "Tokens")
"""Headers of the last columns of `build_heldout_table`."""
_MAX_RARE = 3
"""Maximum number of events of a kind that are listed between those of other kinds."""


def build_summary_table(record: RunRecord) -> list[tuple[str, str]]:
    """Return the names and values of the summary."""
    last = record.metrics[-1] if record.metrics else {}
    times = record.get_finite_values("time").tolist()
    times += _get_finite_values(exclude_scores(record.events), "time")
    attempts = {
        *record.get_finite_values("attempt").tolist(),
        *_get_finite_values(record.events, "attempt"),
    }
    wait, step = (np.nansum(record.get_column(f"{key}_seconds")) for key in ("data_wait", "step"))
    share = float(100 * wait / step) if step else math.nan
    wall_time = format_duration(max(times) - min(times)) if times else UNKNOWN
    rows = [
        ("Steps", format_count(get_number(last, "step"))),
        ("Tokens", _format_tokens(get_number(last, "tokens"))),
        ("Started (UTC)", format_timestamp(min(times, default=math.nan))),
        ("Wall time, first to last row", wall_time),
        ("Tokens per second, median", format_count(record.compute_median("tokens_per_second"))),
        ("Model FLOP utilisation, median", format_percent(100 * record.compute_median("mfu"))),
        ("Step time waiting for data", format_percent(share)),
        ("Final training loss (nats per token)", format_decimal(get_number(last, "loss"))),
        ("Attempts", str(len(attempts) or UNKNOWN)),
        ("Uptime", format_percent(100 * record.time_ledger.uptime)),
        ("Goodput", format_percent(100 * record.time_ledger.goodput)),
        ("Ended", _format_exit(record)),
    ]
    if record.num_unreadable:
        rows.append(("Unreadable lines", format_count(record.num_unreadable)))
    return rows


def build_heldout_table(record: RunRecord) -> list[tuple[str, ...]]:
    """Return a row for each source and their mean.

    It contains loss and bits per byte at the first and the last evaluation, of the same text; and
    bits per byte, standard error, documents and tokens of all text of the last one.
    """
    evaluations = list(record.evaluations.values())
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    loss, bits = (
        [get_numbers(get_loop_row(row), key) for row in (first, last)]
        for key in ("loss", "bits_per_byte")
    )
    all_bits, errors = get_numbers(last, "bits_per_byte"), get_numbers(last, "stderr")
    counts = [get_numbers(last, key) for key in ("documents", "tokens")]
    decimals = [*loss, *bits, all_bits, errors]
    worse = find_worse_sources(first, last)
    names = sorted({*chain(*decimals)}, key=lambda name: (name == "mean", name))
    rows: list[tuple[str, ...]] = [
        (
            f"{name} (worse than at the start)" if name in worse else name,
            *(format_decimal(values.get(name, math.nan)) for values in decimals),
            *(format_count(values.get(name, math.nan)) for values in counts),
        )
        for name in names
    ]
    averages = [get_average_row(row) for row in (first, last)]
    if all(averages):
        means = [
            get_number(get_numbers(row, key), "mean")
            for key in ("loss", "bits_per_byte")
            for row in averages
        ]
        means.append(get_number(get_numbers(last["ema"], "bits_per_byte"), "mean"))
        unknown = (UNKNOWN,) * 3  # standard error, documents and tokens are those of the mean
        rows.append(("mean, moving average", *map(format_decimal, means), *unknown))
    return rows


def build_data_table(record: RunRecord) -> list[tuple[str, ...]]:
    """Return phase, source, tokens, share of the phase, documents and epochs."""
    rows: list[tuple[str, ...]] = []
    for stage in record.data_ledger:
        sources = stage["sources"]
        total = sum(get_number(entry, "tokens") for entry in sources.values())
        for name, entry in sources.items():
            tokens = get_number(entry, "tokens")
            share = format_percent(100 * tokens / total) if total else UNKNOWN
            documents = format_count(get_number(entry, "documents"))
            epochs = format_decimal(get_number(entry, "epochs"))
            rows.append((stage["name"], name, format_count(tokens), share, documents, epochs))
    return rows


def build_sample_tables(record: RunRecord) -> dict[str, list[tuple[str, str]]]:
    """Return step and text by prompt of the samples, at most `_MAX_SAMPLES` steps of each."""
    rows = {row["step"]: row for row in record.events if row.get("event") == "samples"}
    tables: dict[str, list[tuple[str, str]]] = {}
    for step, row in sorted(rows.items()):
        for sample in row.get("texts", []):
            tables.setdefault(sample["prompt"], []).append((format_count(step), sample["text"]))
    return {prompt: _select_evenly(samples) for prompt, samples in tables.items()}


def _select_evenly(samples: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return up to `_MAX_SAMPLES` samples with the first and the last."""
    count = min(len(samples), _MAX_SAMPLES)
    return [samples[i * (len(samples) - 1) // max(1, count - 1)] for i in range(count)]


def build_event_tables(record: RunRecord) -> dict[str, list[tuple[str, ...]]]:
    """Return tables of events by title.

    The first one, without title, contains the rare kinds; each kind of more than `_MAX_RARE` events
    has its own table. A row contains UTC time, attempt, step, kind and further fields.
    """
    rows = [row for row in record.events if row.get("event") not in _EVENTS_WITH_TABLES]
    kinds = [format_value(row.get("event")) for row in rows]
    counts = Counter(kinds)
    tables: dict[str, list[tuple[str, ...]]] = {"": []}
    for row, kind in zip(rows, kinds, strict=True):
        title = f"{kind}: {format_count(counts[kind])}" if counts[kind] > _MAX_RARE else ""
        tables.setdefault(title, []).append(
            (
                format_timestamp(get_number(row, "time")),
                format_value(row.get("attempt")),
                format_count(row["step"]),
                kind,
                _format_details(row),
            )
        )
    return {title: table for title, table in tables.items() if table}


def _get_finite_values(rows: list[Row], key: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := get_number(row, key))]


def _format_tokens(value: float) -> str:
    return f"{format_count(value)} ({format_short(value)})" if value >= 1e4 else format_count(value)


def get_run_state(record: RunRecord) -> str:
    """Return the last end event of the last attempt, or "running or killed"."""
    end = _find_end_event(record)
    return format_value(end["event"]) if end else "running or killed"


def _format_exit(record: RunRecord) -> str:
    end = _find_end_event(record)
    if end is None:
        return "no end is recorded: running or killed"
    return "; ".join(filter(None, [format_value(end["event"]), _format_details(end)]))


def _find_end_event(record: RunRecord) -> Row | None:
    ends = [row for row in record.last_attempt_events if row.get("event") in END_EVENTS]
    return ends[-1] if ends else None


def _format_details(row: Row) -> str:
    keys = [key for key in row if key not in _POSITION_KEYS | _HIDDEN_KEYS]
    return "; ".join(f"{key}: {format_value(row[key])}" for key in keys)
