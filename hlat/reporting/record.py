"""What a run wrote down, as plain data.

A run may be killed while it writes, so every file may be missing, empty or torn; what can be read
is shown, and what cannot be read is counted.
"""

import gc
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hlat.config.errors import ConfigError
from hlat.recovery import goodput

Row = dict[str, Any]

_AT_ONCE = 10_000
"""Lines that are read together."""
_SCORED = ("scores", "stderr")
_FILES = ("config.yaml", "provenance.json", "metrics.jsonl", "events.jsonl")


@dataclass(frozen=True)
class Record:
    """The files of a run folder.

    Attributes:
        name: The run's name, which is its folder's.
        metrics: Rows of metrics.jsonl, one per logged step.
        events: Rows of events.jsonl.
        config: Text of config.yaml.
        provenance: Content of provenance.json.
        unreadable: Lines and files that could not be understood.
    """

    name: str
    metrics: list[Row]
    events: list[Row]
    config: str
    provenance: Row
    unreadable: int

    def column(self, key: str) -> NDArray[np.float64]:
        """A number of each row of metrics.jsonl; NaN where it is missing or not finite."""
        if key not in self._columns:
            values = [row.get(key) for row in self.metrics]
            if not set(map(type, values)) <= {int, float, type(None)}:
                values = [number(row, key) for row in self.metrics]
            column = np.array(values, dtype=np.float64)
            self._columns[key] = np.where(np.isfinite(column), column, np.nan)
        return self._columns[key]

    @cached_property
    def _columns(self) -> dict[str, NDArray[np.float64]]:
        return {}

    @property
    def last_attempt(self) -> list[Row]:
        """Events from the newest start or resume on."""
        starts = [i for i, row in enumerate(self.events) if row.get("event") in ("start", "resume")]
        return self.events[starts[-1] if starts else 0 :]

    @property
    def evaluations(self) -> dict[int, Row]:
        """Evaluation events by step, in order; of a step that was run twice, the newer one."""
        return self._by_step("evaluate")

    @property
    def scores(self) -> dict[int, Row]:
        """Score events by step, in order; of a step that was evaluated twice, all that was scored.

        Tasks may be evaluated one by one; of a task that was scored twice the newer score counts.
        """
        found: dict[int, Row] = {}
        for row in self.events:
            if row.get("event") == "score" and isinstance(row.get("scores"), dict):
                before = found.get(row["step"], {})
                told = {key: {**before.get(key, {}), **_dictionary(row, key)} for key in _SCORED}
                found[row["step"]] = before | row | told
        return dict(sorted(found.items()))

    @cached_property
    def began(self) -> float:
        """Unix time of the first sign of life; NaN of a run without any."""
        times = self.column("time")
        told = [number(row, key) for row in self.events for key in ("time", "began")]
        known = [*times[np.isfinite(times)][:1].tolist(), *filter(math.isfinite, told)]
        return min(known, default=math.nan)

    @cached_property
    def lifetime(self) -> goodput.Ledger:
        """Where its time went."""
        columns = {key: self.column(key) for key in goodput.COLUMNS}
        return goodput.ledger(columns, self.events)

    def _by_step(self, event: str) -> dict[int, Row]:
        rows = {row["step"]: row for row in self.events if row.get("event") == event}
        return dict(sorted(rows.items()))

    @property
    def ledger(self) -> list[Row]:
        """What each phase has read from each source, as the newest save tells."""
        rows = [row for row in self.events if row.get("event") == "ledger"]
        return rows[-1]["stages"] if rows else []


def read(folder: Path) -> Record:
    """Read a run folder.

    Raises:
        ConfigError: It is no run folder: none of a run's files is there.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run folder: it has none of {', '.join(_FILES)}")
    metrics, torn_metrics = _rows(_bytes(folder / "metrics.jsonl"))
    events, torn_events = _rows(_bytes(folder / "events.jsonl"))
    provenance, torn_provenance = _rows(_bytes(folder / "provenance.json").replace(b"\n", b" "))
    return Record(
        name=folder.resolve().name,
        metrics=metrics,
        events=[row for row in events if _is_event(row)],
        config=_bytes(folder / "config.yaml").decode(errors="replace"),
        provenance=provenance[0] if provenance else {},
        unreadable=torn_metrics + torn_events + torn_provenance,
    )


def is_run(folder: Path) -> bool:
    """Whether a folder has any of the files of a run."""
    return any((folder / name).is_file() for name in _FILES)


def number(row: Row, key: str) -> float:
    """A number of a row; NaN if it is missing or none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def numbers(row: Row, key: str) -> dict[str, float]:
    """The numbers of a row's dictionary, such as the bits per byte of an evaluation by source."""
    values = row.get(key)
    return {name: number(values, name) for name in values} if isinstance(values, dict) else {}


def _dictionary(row: Row, key: str) -> Row:
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def _is_event(row: Row) -> bool:
    return isinstance(row.get("step"), int) and isinstance(row.get("event"), str)


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _rows(text: bytes) -> tuple[list[Row], int]:
    lines = [line for line in text.split(b"\n") if line and not line.isspace()]
    rows: list[Row] = []
    unreadable = 0
    with _nothing_collected():
        for start in range(0, len(lines), _AT_ONCE):
            chunk = lines[start : start + _AT_ONCE]
            read = _read_at_once(chunk) or [*map(_row, chunk)]
            rows += [row for row in read if row is not None]
            unreadable += sum(row is None for row in read)
    return rows, unreadable


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Look for no garbage meanwhile: among a million rows that takes a quarter of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _read_at_once(lines: list[bytes]) -> list[Row | None]:
    """Read lines as one array, which is faster; empty if any of them is no object."""
    if not all(line[:1] == b"{" and line[-1:] == b"}" for line in lines):
        return []
    try:
        rows = orjson.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return []
    # A line of two objects would be two rows here, and is unreadable
    return rows if len(rows) == len(lines) else []


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line.decode(errors="replace"))
    except (RecursionError, ValueError):
        return None
    return row if isinstance(row, dict) else None
