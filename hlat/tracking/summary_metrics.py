"""Summary metrics of a run, used to compare runs."""

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import fmean, median

from hlat.tracking.lost_work import START_EVENTS
from hlat.tracking.row_validation import Row, is_finite_number
from hlat.tracking.spike_score import compute_spike_score

_COUNTED_EVENTS = ("spike", "skip", "rollback", "restart")
_DIAGNOSTICS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "max_attention_logit": ("attention_logit_max", max),
    "max_output_logit": ("output_logit_max", max),
    "final_log_z": ("output_log_z", lambda values: values[-1]),
    "median_update_rms": ("update_rms", median),
    "mean_unchanged_weights": ("unchanged_weights", fmean),
    "max_moment_ratio": ("moment_ratio_rms", max),
    "max_moment_underflow": ("moment_underflow", max),
}
"""Column of metrics.jsonl and the function of its values, by summary metric."""


def compute_summary_metrics(rows: Iterable[Row], events: Iterable[Row]) -> dict[str, float]:
    """Return the known summary metrics: last step, losses, throughput, cost, spikes, diagnostics.

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
            summary |= _score_spikes("loss", losses)
        summary |= _score_spikes("grad_norm", _get_finite_values(rows, "grad_norm"))
        for key in ("tokens_per_second", "mfu"):
            if values := _get_finite_values(rows, key):
                summary[f"median_{key}"] = median(values)
        for name, (key, reduce) in _DIAGNOSTICS.items():
            if key in last and (values := _get_finite_values(rows, key)):
                summary[name] = reduce(values)
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


def _score_spikes(key: str, values: list[float]) -> dict[str, float]:
    """Return the spike score of a column, unless there are too few values."""
    score = compute_spike_score(values)
    return {} if score is None else {f"{key}_spike_score": score}


def _get_finite_values(rows: Iterable[Row], key: str) -> list[float]:
    return [row[key] for row in rows if is_finite_number(row.get(key))]
