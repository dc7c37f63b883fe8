"""The interface between the Tracker and the services that display a run.

The Tracker appends each row to metrics.jsonl or events.jsonl and then passes it to every
MetricLogger, in the same order. Loggers return nothing, so an unavailable service does not
change the results or the timing of a run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.tracking.row_validation import Row, is_finite_number

MODEL_METRICS = ("loss", "grad_norm", "param_norm", "learning_rate")
"""Columns of metrics.jsonl about the model; plotted over tokens (HLAT paper, figure 1)."""
_ROUTER_PREFIX = "router_"
"""Start of the names of the metrics of routers, also of those of extensions."""
_LAYER_METRICS = {"router_violations": "violation", "router_loads": "load"}
"""Columns of metrics.jsonl with a list over layers, and the names of their values."""
_POSITION_KEYS = ("step", "tokens", "attempt", "time")
ALERT_EVENTS = (
    *("spike", "rollback", "diverge", "restart"),
    *("give_up", "stall", "interrupt", "finish"),
)
"""Events that trigger an alert of the service; spikes only if they are large."""
_ALERT_FACTOR = 5.0
"""Gradient norm of a spike relative to the running average above which it triggers an alert."""


@dataclass(frozen=True)
class RunInfo:
    """Description of an attempt when it starts.

    `service_run_id` is the same in all attempts. `repeats_rows` is True if rows of earlier attempts
    after `step` will be logged again. The configuration is redacted
    (`hlat.config.recorded_config`); `overrides` are those of the user.
    """

    run_dir: Path
    name: str
    service_run_id: str
    attempt: int
    step: int
    total_steps: int
    config: dict[str, Any]
    code_revision: str | None
    overrides: tuple[str, ...] = ()
    repeats_rows: bool = False


class MetricLogger:
    """Base class of loggers for one attempt of a run; all methods do nothing by default."""

    def start(self, run_info: RunInfo) -> None:
        """Start logging an attempt."""

    def log_metrics(self, row: Row) -> None:
        """Log a row of metrics.jsonl."""

    def log_event(self, row: Row) -> None:
        """Log a row of events.jsonl."""

    def rewind(self, step: int) -> None:
        """Discard the rows after `step`, which will be logged again."""

    def finish(self, summary: Mapping[str, float]) -> None:
        """Log the summary metrics of the run and close the logger."""

    def abort(self) -> None:
        """Stop immediately, after a failure or a timeout of `finish`."""


def extract_scalars(row: Row) -> dict[str, float]:
    """Return the finite numbers of a row of metrics.jsonl, named `train/...` or `perf/...`.

    Those of layers and experts are named `router/load/layer_0/expert_0` or `router/.../layer_0`.
    """
    by_layer = {
        f"router/{name}/{key}": number
        for column, name in _LAYER_METRICS.items()
        for key, number in _flatten(row.get(column), ("layer_", "/expert_"))
    }
    return by_layer | {
        f"{'train' if _is_of_model(key) else 'perf'}/{key}": float(value)
        for key, value in row.items()
        if key not in _POSITION_KEYS and is_finite_number(value)
    }


def _flatten(value: Any, prefixes: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of nested lists, each with the prefix and index of its lists."""
    if is_finite_number(value):
        yield "", float(value)
    elif isinstance(value, list) and prefixes:
        for index, item in enumerate(value):
            for key, number in _flatten(item, prefixes[1:]):
                yield f"{prefixes[0]}{index}{key}", number


def _is_of_model(key: str) -> bool:
    return key in MODEL_METRICS or key.startswith(_ROUTER_PREFIX)


def extract_event_scalars(row: Row) -> dict[str, float]:
    """Return the finite numbers of an event, as `eval/SET/METRIC` or `data/tokens/SOURCE`.

    A set is a held-out source, their `mean`, a probe, or a task of `hlat evaluate`. Those of the
    moving average of the weights are named `eval_ema/SET/METRIC`.
    """
    scalars: dict[str, float] = {}
    if row["event"] == "evaluate":
        for prefix, fields in (("eval", row), ("eval_ema", row.get("ema", {}))):
            for metric in ("bits_per_byte", "loss", "accuracy", "answer_bits_per_byte"):
                values = fields.get(metric, {}).items()
                scalars |= {f"{prefix}/{name}/{metric}": value for name, value in values}
    elif row["event"] == "score":
        scalars |= {f"eval/{name}/score": value for name, value in row["scores"].items()}
    elif row["event"] == "ledger":
        for stage in row["stages"]:
            for source, counts in stage["sources"].items():
                name = f"data/tokens/{source}"
                scalars[name] = scalars.get(name, 0.0) + counts["tokens"]
    return {name: float(value) for name, value in scalars.items() if is_finite_number(value)}


def format_samples(row: Row) -> str:
    """Return the texts of a `samples` event in Markdown, each in a block of code."""
    return "\n\n".join(
        f"prompt {number}\n\n{_indent(sample['prompt'])}\n\ntext\n\n{_indent(sample['text'])}"
        for number, sample in enumerate(row["texts"], 1)
    )


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


def needs_alert(row: Row) -> bool:
    """Return True if an event triggers an alert."""
    if row["event"] != "spike":
        return row["event"] in ALERT_EVENTS
    grad_norm, average = row.get("grad_norm"), row.get("average")
    if not (is_finite_number(grad_norm) and is_finite_number(average)):
        return False
    return grad_norm > _ALERT_FACTOR * average


def format_alert(row: Row) -> str:
    """Return the text of an alert."""
    keys = ("reason", "grad_norm", "to", "signal", "seconds", "count")
    details = "; ".join(f"{key}: {row[key]}" for key in keys if key in row)
    return f"step {row['step']}" + (f": {details}" if details else "")
