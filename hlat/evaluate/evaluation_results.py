"""Scores of a model in a JSON file, and the `score` event of its run.

The file contains the newest result of every task of one model. The event feeds the curves of the
run, which may be in training: one write appends the row, without a lock.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.evaluate.model_source import ModelSource
from hlat.evaluate.paper_tasks import AVERAGE, COLUMNS, TaskSpec, compute_average, compute_scores
from hlat.storage import durable_files
from hlat.tracking.run_directory import replace_file

ScoreRow = dict[str, Any]


@dataclass(frozen=True)
class TaskResult:
    """Result of one task.

    Attributes:
        shots: Few-shot examples; None: they differ within a group.
        metrics: Metrics by `metric,filter`, as fractions of 1.
        errors: Standard errors of these metrics, where known.
        counts: Metric of the paper's tables; empty: none.
        questions: Number of questions.
        limit: Maximum number of questions of each task; None: all.
    """

    shots: int | None
    metrics: dict[str, float]
    errors: dict[str, float]
    counts: str
    questions: int
    limit: int | None


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
        name: {**vars(result), **metadata} for name, result in results.items()
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
        "name": source.name,
        "location": str(source.location),
        "step": source.step,
        "tokens": source.tokens,
        "scores": scores,
        "stderr": previous.get("stderr", {}) | errors,
        "tasks": tasks,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(row, indent=2) + "\n").encode())
    durable_files.fsync_directory(path.parent)
    return row


def load_scores(path: Path) -> ScoreRow:
    """Return the content of a scores file; raise ConfigError if the file is invalid."""
    try:
        row = json.loads(path.read_text())
        if not all(isinstance(row[key], dict) for key in ("scores", "stderr", "tasks")):
            raise TypeError("no scores")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a valid scores file ({error!r}); move it away to evaluate again"
        ) from error
    return dict(row)


def load_completed_tasks(path: Path, limit: int | None) -> dict[str, TaskResult]:
    """Return the results in a scores file with the given limit of questions."""
    rows = load_scores(path)["tasks"] if path.is_file() else {}
    names = [field.name for field in fields(TaskResult)]
    return {
        task: TaskResult(**{name: row[name] for name in names})
        for task, row in rows.items()
        if row["limit"] == limit
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
    keys.add(AVERAGE)
    limits = {result.limit for result in results.values() if result.limit is not None}
    event = {
        "event": "score",
        "step": source.step,
        "time": time.time(),
        "tokens": source.tokens,
        "scores": {key: value for key, value in row["scores"].items() if key in keys},
        "stderr": {key: value for key, value in row["stderr"].items() if key in keys},
        **({"limit": max(limits)} if limits else {}),
    }
    _append_row(source.run_dir / "events.jsonl", event)


def _append_row(path: Path, row: ScoreRow) -> None:
    """Append a row to a JSONL file that another process may write to.

    A partial line of a killed process is terminated first, so that the new row remains readable.
    The next process that trains in the directory removes the partial line.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(fd).st_size
        is_partial = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        line = b"\n" * is_partial + json.dumps(row, allow_nan=False).encode() + b"\n"
        if os.write(fd, line) < len(line):
            raise OSError(f"only a part of a row was written to {path}")
    finally:
        os.close(fd)
