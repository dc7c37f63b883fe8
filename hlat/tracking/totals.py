"""What a run has come to, in the few numbers by which runs are compared."""

import math
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

Row = dict[str, Any]

_COUNTED = {"spike": "spikes", "skip": "skips", "rollback": "rollbacks", "restart": "restarts"}


def totals(rows: Iterable[Row], events: Iterable[Row]) -> dict[str, float]:
    """Return the numbers that are known: where it stands, its losses, speed, cost and mishaps.

    Args:
        rows: Rows of metrics.jsonl.
        events: Rows of events.jsonl.
    """
    rows, events = list(rows), list(events)
    found: dict[str, float] = {}
    if rows:
        last = rows[-1]
        found |= {key: last[key] for key in ("step", "tokens", "cost_usd") if _finite(last, key)}
        if losses := _finite_values(rows, "loss"):
            found |= {"final_loss": losses[-1], "best_loss": min(losses)}
        for key in ("tokens_per_second", "mfu"):
            if values := _finite_values(rows, key):
                found[f"median_{key}"] = median(values)
    evaluations = [row for row in events if row["event"] == "evaluate"]
    bits = evaluations[-1].get("bits_per_byte") if evaluations else None
    if isinstance(bits, dict) and _finite(bits, "mean"):
        found["heldout_bits_per_byte"] = bits["mean"]
    happened = Counter(row["event"] for row in events)
    return found | {name: happened[event] for event, name in _COUNTED.items()}


def _finite_values(rows: Iterable[Row], key: str) -> list[float]:
    return [row[key] for row in rows if _finite(row, key)]


def _finite(row: Row, key: str) -> bool:
    value = row.get(key)
    return isinstance(value, int | float) and math.isfinite(value)
