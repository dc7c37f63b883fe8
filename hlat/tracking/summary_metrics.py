"""Summary metrics of a run, used to compare runs."""

from collections import Counter
from collections.abc import Iterable
from statistics import median

from hlat.tracking.lost_work import START_EVENTS
from hlat.tracking.row_validation import Row, is_finite_number

_COUNTED_EVENTS = ("spike", "skip", "rollback", "restart")


def compute_summary_metrics(rows: Iterable[Row], events: Iterable[Row]) -> dict[str, float]:
    """Return the known summary metrics: last step, losses, throughput, cost and event counts.

    `rows` and `events` are those of metrics.jsonl and events.jsonl. `start_step` is the step of the
    checkpoint of another run from which the run started.
    """
    rows, events = list(rows), list(events)
    summary: dict[str, float] = {}
    if start_step := next((row["step"] for row in events if row["event"] in START_EVENTS), 0):
        summary["start_step"] = start_step
    if rows:
        last = rows[-1]
        keys = ("step", "tokens", "cost_usd")
        summary |= {key: last[key] for key in keys if is_finite_number(last.get(key))}
        if losses := _get_finite_values(rows, "loss"):
            summary |= {"final_loss": losses[-1], "best_loss": min(losses)}
        for key in ("tokens_per_second", "mfu"):
            if values := _get_finite_values(rows, key):
                summary[f"median_{key}"] = median(values)
    evaluations = [row for row in events if row["event"] == "evaluate"]
    evaluation: Row = evaluations[-1] if evaluations else {}
    ema = evaluation.get("ema")
    of_ema: Row = ema if isinstance(ema, dict) else {}
    for prefix, row in (("heldout", evaluation), ("heldout_ema", of_ema)):
        bits = row.get("bits_per_byte")
        if isinstance(bits, dict) and is_finite_number(bits.get("mean")):
            summary[f"{prefix}_bits_per_byte"] = bits["mean"]
    counts = Counter(row["event"] for row in events)
    return summary | {f"{event}s": counts[event] for event in _COUNTED_EVENTS}


def _get_finite_values(rows: Iterable[Row], key: str) -> list[float]:
    return [row[key] for row in rows if is_finite_number(row.get(key))]
