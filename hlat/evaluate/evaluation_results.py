"""Scores of a model in a JSON file, and the `score` event of its run.

The file contains the newest result of every task of one model. The event feeds the curves of the
run, which may be in training: one write appends the row, without a lock.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.redaction import redact_text
from hlat.evaluate import answer_bits
from hlat.evaluate.paper_tasks import AVERAGE, COLUMNS, TaskSpec, compute_average, compute_scores
from hlat.figures.page_templates import render_text
from hlat.inference.model_source import ModelSource
from hlat.storage import durable_files
from hlat.tracking.row_validation import is_finite_number
from hlat.tracking.run_directory import EVALUATIONS_DIR, validate_no_symlinks
from hlat.tracking.text_format import is_proportion

_PAPER_TABLES = Path(__file__).with_name("templates") / "paper_tables.txt.j2"
ANSWER_BITS = f"{answer_bits.METRIC},none"
"""Bits per byte of the correct answers in a result, as `metric,filter`."""
ScoreRow = dict[str, Any]
TaskResult = dict[str, Any]
"""Result of one task, as in a scores file.

`shots` are the few-shot examples, None if they differ within a group; `metrics` are the harness's
values by `metric,filter`, and `errors` their standard errors, where known; `counts` is the metric
of the paper's tables, empty if there is none; `questions` is the number of questions, and `limit`
their maximum for each task, None for all. `HarnessFiles.save` adds the keys of harness tasks.
"""


def format_metric(name: str, value: float, error: float | None) -> str:
    """Return a metric with its standard error, in percent if it is a proportion.

    Other metrics, such as perplexities, have the harness's four decimals.
    """
    metric = name.partition(",")[0]
    if is_proportion(name):
        spread = "" if error is None else f" ({100 * error:.2f})"
        return f"{metric} {100 * value:.2f}%{spread}"
    spread = "" if error is None else f" ({error:.4f})"
    return f"{metric} {value:.4f}{spread}"


def parse_task_results(
    spec: TaskSpec, harness_results: Mapping[str, Any], limit: int | None
) -> dict[str, TaskResult]:
    """Return the result of a task, or of each task of a group without an aggregate."""
    rows = {**harness_results["results"], **harness_results.get("groups", {})}
    num_questions, shots = harness_results["n-samples"], harness_results["n-shot"]
    results = {}
    for name in [spec.name] if spec.name in rows else harness_results["results"]:
        tasks = [name] if name in num_questions else [*num_questions]
        task_shots = {shots[task] for task in tasks}
        metrics: dict[str, float] = {}
        errors: dict[str, float] = {}
        for key, value in rows[name].items():
            metric, comma, metric_filter = key.partition(",")
            if comma and isinstance(value, int | float) and math.isfinite(value):
                target = errors if metric.endswith("_stderr") else metrics
                target[f"{metric.removesuffix('_stderr')},{metric_filter}"] = float(value)
        samples = [sample for task in tasks for sample in harness_results["samples"][task]]
        if found := answer_bits.summarize_samples(samples):
            metrics[ANSWER_BITS], error = found
            if math.isfinite(error):
                errors[ANSWER_BITS] = error
        results[name] = TaskResult(
            shots=task_shots.pop() if len(task_shots) == 1 else None,
            metrics=metrics,
            errors=errors,
            counts=spec.metric,
            questions=sum(num_questions[task]["effective"] for task in tasks),
            limit=limit,
        )
    return results


def save_scores(
    source: ModelSource, path: Path, results: Mapping[str, TaskResult], metadata: ScoreRow
) -> ScoreRow:
    """Merge results into a scores file, and return its new content."""
    previous = load_scores(path) if path.is_file() else {}
    tasks = previous.get("tasks", {}) | {
        name: result | metadata for name, result in results.items()
    }
    measured = {
        name: (task["metrics"][task["counts"]], task["errors"].get(task["counts"]))
        for name, task in tasks.items()
        if task["counts"] in task["metrics"]
    }
    new_scores, errors = compute_scores(measured)
    scores = previous.get("scores", {}) | new_scores
    if (average := compute_average(scores)) is not None:
        scores[AVERAGE] = average
    row = {
        "name": redact_text(source.name),
        "location": redact_text(str(source.location)),
        "step": source.step,
        "tokens": source.tokens,
        "scores": scores,
        "stderr": previous.get("stderr", {}) | errors,
        "tasks": tasks,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    durable_files.replace_file(path, (json.dumps(row, indent=2) + "\n").encode())
    durable_files.fsync_directory(path.parent)
    return row


def load_scores(path: Path) -> ScoreRow:
    """Return the content of a scores file; raise ConfigError if the file is invalid."""
    try:
        row = json.loads(path.read_text())
        _validate_scores(row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a valid scores file ({error!r}); move it away to evaluate again"
        ) from error
    return dict(row)


def _validate_scores(row: ScoreRow) -> None:
    """Raise TypeError or KeyError if a row differs from those of `save_scores`."""
    for key in ("scores", "stderr"):
        for name, value in row[key].items():
            if not is_finite_number(value):
                raise TypeError(f"{key} of {name} is not a number")
    if not isinstance(row["name"], str):
        raise TypeError("name is not a string")
    counts = [row["step"], row.get("tokens"), *(task["limit"] for task in row["tasks"].values())]
    if not all(value is None or is_finite_number(value) for value in counts):
        raise TypeError("step, tokens or limit is not a number")
    for task in row["tasks"].values():
        values = [*task["metrics"].values(), *task["errors"].values(), task.get("questions", 0)]
        if not all(map(is_finite_number, values)):
            raise TypeError("a metric or the number of questions is not a number")
        if any(
            type(v) not in (bool, type(None)) for v in task.get("higher_is_better", {}).values()
        ):
            raise TypeError("a value of higher_is_better is not true or false")
        task.get("sample_files", {}).items()
        if not isinstance(task["counts"], str):
            raise TypeError("counts is not a string")


def load_evaluated_models(directory: Path) -> list[ScoreRow]:
    """Return the scores of each model of a directory, with full name, limits and path.

    `directory` may also be a scores file. Raise ConfigError if there are none.
    """
    models = []
    paths = sorted((directory / EVALUATIONS_DIR).glob("*.json"))
    for path in [directory] if directory.is_file() else paths:
        row = load_scores(path)
        limits = [task["limit"] for task in row["tasks"].values() if task.get("limit") is not None]
        parent = path.resolve().parent
        base = parent.parent.name if parent.name == EVALUATIONS_DIR else path.stem
        name = f"{base} {_format_model_name(row)}".strip()
        models.append(row | {"name": name, "limits": limits, "scores_path": path})
    if not models:
        raise ConfigError(
            f"{directory} has no scores in {EVALUATIONS_DIR}/; give the directory of a run or a "
            f"model, and evaluate it first: hlat evaluate {directory} tasks=hlat_table2"
        )
    return models


def format_paper_tables(models: Sequence[ScoreRow]) -> list[str]:
    """Return the lines of the paper's Tables II, IV and V with the scores of the models."""
    return render_text(_PAPER_TABLES, models=models)


def load_completed_tasks(
    path: Path, limit: int | None, with_samples: bool = False
) -> dict[str, TaskResult]:
    """Return the results in a scores file that have the given limit.

    With `with_samples`, results of the harness without per-item output are omitted.
    """
    rows = load_scores(path)["tasks"] if path.is_file() else {}
    return {
        task: row
        for task, row in rows.items()
        if row["limit"] == limit
        and not (with_samples and "harness" in row and "sample_files" not in row)
    }


def record_run_scores(
    source: ModelSource, row: ScoreRow, results: Mapping[str, TaskResult]
) -> None:
    """Append a `score` event to the run of a training state.

    There is no event if the new results complete no column of the paper's tables.
    """
    keys = {
        column.key
        for column in COLUMNS
        if any(spec.name in results for spec in column.tasks) and column.key in row["scores"]
    }
    if source.run_dir is None or not keys:
        return
    validate_no_symlinks(source.run_dir)
    keys.add(AVERAGE)
    limits = {result["limit"] for result in results.values()} - {None}
    bits = {
        name: result["metrics"][ANSWER_BITS]
        for name, result in results.items()
        if ANSWER_BITS in result["metrics"]
    }
    event = {
        "event": "score",
        "step": source.step,
        "time": time.time(),
        "tokens": source.tokens,
        "scores": {key: value for key, value in row["scores"].items() if key in keys},
        "stderr": {key: value for key, value in row["stderr"].items() if key in keys},
        **({answer_bits.METRIC: bits} if bits else {}),
        **({"limit": max(limits)} if limits else {}),
    }
    _append_row(source.run_dir / "events.jsonl", event)


def _append_row(path: Path, row: ScoreRow) -> None:
    """Append a row to a JSONL file that another process may write to.

    A partial line of a killed process is terminated first, so that the new row remains readable.
    The next process that trains in the directory removes the partial line.
    """
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        is_partial = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        line = b"\n" * is_partial + json.dumps(row, allow_nan=False).encode() + b"\n"
        if file.write(line) < len(line):
            raise OSError(f"only a part of a row was written to {path}")


def _format_model_name(row: ScoreRow) -> str:
    if row["step"] is None:
        return "" if row["name"] == "scores" else str(row["name"])
    tokens = row.get("tokens")
    return f"step {row['step']}" + ("" if tokens is None else f", {_format_num_tokens(tokens)}")


def _format_num_tokens(tokens: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return str(tokens)
