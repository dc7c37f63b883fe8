"""The seam between the record of a run and those who show it elsewhere.

The record is the run's memory and is written first. Whoever else wants to know hears the same few
things in the same order, and nothing that a listener does comes back: a service that is down must
not change what a run computes, nor when.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]

LEARNING = ("loss", "grad_norm", "param_norm", "learning_rate")
"""Columns of metrics.jsonl that tell of the model; over tokens, as in the paper's figure 1."""
_PLACE = ("step", "tokens", "attempt", "time")
ALERTS = ("spike", "rollback", "diverge", "restart", "give_up", "stall", "interrupt", "finish")
"""Events that somebody wants to be told of who does not look."""


@dataclass(frozen=True)
class Beginning:
    """What is known of an attempt when it begins.

    Attributes:
        folder: The run folder.
        name: The run's name.
        identity: Under which the listener knows the run, the same in all attempts.
        attempt: Its number, from 1.
        step: Where it goes on; rows beyond it will be told again.
        total_steps: Where the run ends.
        config: The configuration as it may be told (config.told).
        code_revision: Of the code; None where it is not known.
    """

    folder: Path
    name: str
    identity: str
    attempt: int
    step: int
    total_steps: int
    config: dict[str, Any]
    code_revision: str | None


class Listener(Protocol):
    """Shows one attempt at a run."""

    def begin(self, beginning: Beginning) -> None:
        """An attempt begins."""
        ...

    def row(self, row: Row) -> None:
        """A row was written to metrics.jsonl."""
        ...

    def event(self, row: Row) -> None:
        """A row was written to events.jsonl."""
        ...

    def rewind(self, step: int) -> None:
        """Rows beyond `step` have left the record and will be told again."""
        ...

    def finish(self, summary: Mapping[str, float]) -> None:
        """The attempt is over, and `summary` is what the run has come to."""
        ...

    def abandon(self) -> None:
        """Leave everything as it is, at once: it has failed, or takes too long to finish."""
        ...


def scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row of metrics.jsonl by the names that services show them under."""
    names = {key: f"{'train' if key in LEARNING else 'speed'}/{key}" for key in row}
    numbers = {names[key]: row[key] for key in row if key not in _PLACE}
    return {name: float(value) for name, value in numbers.items() if _is_number(value)}


def event_scalars(row: Row) -> dict[str, float]:
    """Return the same of an event: held-out text and scores by name, what was read of a source."""
    told: dict[str, float] = {}
    if row["event"] == "evaluate":
        for kind in ("bits_per_byte", "loss", "accuracy"):
            values = row.get(kind, {}).items()
            told |= {f"heldout/{kind}/{name}": value for name, value in values}
    elif row["event"] == "score":
        told |= {f"eval/{name}": value for name, value in row["scores"].items()}
    elif row["event"] == "ledger":
        for stage in row["stages"]:
            for source, read in stage["sources"].items():
                name = f"data/tokens/{source}"
                told[name] = told.get(name, 0.0) + read["tokens"]
    return {name: float(value) for name, value in told.items() if _is_number(value)}


def sentence(row: Row) -> str:
    """Return what an alert says."""
    told = ("reason", "grad_norm", "to", "signal", "seconds", "count")
    details = "; ".join(f"{key}: {row[key]}" for key in told if key in row)
    return f"step {row['step']}" + (f": {details}" if details else "")


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
