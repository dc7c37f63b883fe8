"""What an evaluation found: a file beside what was evaluated, and an event in the run's record.

The file holds everything that was ever measured of one model, each task as it was measured last.
The event is what curves are drawn from. Whoever trains there meanwhile is not disturbed: a row is
appended in one piece, nothing is rewritten and no lock is taken.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hlat.checkpoint import durable
from hlat.config.errors import ConfigError
from hlat.evaluation.subject import Subject
from hlat.evaluation.tasks import AVERAGE, COLUMNS, Item, average, scores
from hlat.tracking.run_folder import EVALUATIONS

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What one task came to.

    Attributes:
        shots: Examples before each question; None: they differ within a group.
        metrics: Every number by `metric,filter`, as shares of 1.
        errors: Standard errors of those that have one.
        counts: Which of them counts in the paper's tables; empty: none.
        questions: How many were asked.
        limit: How many of each of its tasks at most; None: all.
    """

    shots: int | None
    metrics: dict[str, float]
    errors: dict[str, float]
    counts: str
    questions: int
    limit: int | None


def read_task(item: Item, found: Mapping[str, Any], limit: int | None) -> dict[str, Task]:
    """What the harness found of a task, or of each task of a group that has no mean of its own."""
    numbers = {**found["results"], **found.get("groups", {})}
    names = [item.task] if item.task in numbers else [*found["results"]]
    leaves = {
        name: [name] if name in found["n-samples"] else [*found["n-samples"]] for name in names
    }
    return {
        name: Task(
            shots=_only({found["n-shot"][leaf] for leaf in leaves[name]}),
            metrics=_numbers(numbers[name], lambda metric: not metric.endswith("_stderr")),
            errors=_numbers(numbers[name], lambda metric: metric.endswith("_stderr")),
            counts=item.metric,
            questions=sum(found["n-samples"][leaf]["effective"] for leaf in leaves[name]),
            limit=limit,
        )
        for name in names
    }


def _only(values: set[int]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None


def _numbers(row: Mapping[str, Any], wanted: Any) -> dict[str, float]:
    """Numbers by `metric,filter`, without what marks an error."""
    found = {}
    for key, value in row.items():
        metric, comma, kind = key.partition(",")
        if comma and wanted(metric) and isinstance(value, int | float) and math.isfinite(value):
            found[f"{metric.removesuffix('_stderr')},{kind}"] = float(value)
    return found


def path_of(subject: Subject) -> Path:
    """Where the scores of a model lie."""
    return subject.home / EVALUATIONS / f"{subject.name}.json"


def keep(subject: Subject, path: Path, tasks: Mapping[str, Task], about: Row) -> Row:
    """Write what was found beside what was found before; return the whole.

    Args:
        subject: What was evaluated.
        path: The file.
        tasks: What each task came to.
        about: On what, and by what, it was evaluated.

    Raises:
        OSError: It cannot be written.
    """
    before = read(path) if path.is_file() else {}
    known = {
        **before.get("tasks", {}),
        **{name: {**vars(task), **about} for name, task in tasks.items()},
    }
    counted = {
        name: (task["metrics"][task["counts"]], task["errors"].get(task["counts"]))
        for name, task in known.items()
        if task["counts"] in task["metrics"]
    }
    found, errors = scores(counted)
    found = {**before.get("scores", {}), **found}
    if (mean := average(found)) is not None:
        found[AVERAGE] = mean
    row = {
        "name": subject.name,
        "location": str(subject.location),
        "step": subject.step,
        "tokens": subject.tokens,
        "scores": found,
        "stderr": {**before.get("stderr", {}), **errors},
        "tasks": known,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.tmp")
    written.write_text(json.dumps(row, indent=2) + "\n")
    durable.rename(written, path)
    return row


def read(path: Path) -> Row:
    """What `keep` wrote.

    Raises:
        ConfigError: Something else did.
    """
    try:
        row = json.loads(path.read_text())
        dictionaries = [row[key] for key in ("scores", "stderr", "tasks")]
        if not all(isinstance(each, dict) for each in dictionaries):
            raise TypeError("no scores")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no scores ({error!r}); move it away to evaluate anew"
        ) from error
    return dict(row)


def known(path: Path, limit: int | None) -> dict[str, Task]:
    """The tasks in a file that `keep` wrote of which as many questions were asked.

    Raises:
        ConfigError: Something else wrote it.
    """
    rows = read(path)["tasks"] if path.is_file() else {}
    names = [field.name for field in fields(Task)]
    return {
        task: Task(**{name: row[name] for name in names})
        for task, row in rows.items()
        if row["limit"] == limit
    }


def tell_run(subject: Subject, row: Row, tasks: Mapping[str, Task]) -> Row | None:
    """Append what was found to the record of the run, if the model is a state of one.

    Args:
        subject: What was evaluated.
        row: What `keep` returned.
        tasks: What was found this time.

    Returns:
        The `score` event; None: there is no run, or no whole column of the tables.

    Raises:
        OSError: It cannot be written.
    """
    new = {
        column.key
        for column in COLUMNS
        if any(item.task in tasks for item in column.items) and column.key in row["scores"]
    }
    if subject.run is None or not new:
        return None
    told = new | ({AVERAGE} if AVERAGE in row["scores"] else set())
    limits = {task.limit for task in tasks.values() if task.limit is not None}
    event = {
        "event": "score",
        "step": subject.step,
        "time": time.time(),
        "tokens": subject.tokens,
        "scores": {key: row["scores"][key] for key in row["scores"] if key in told},
        "stderr": {key: row["stderr"][key] for key in row["stderr"] if key in told},
        **({"limit": max(limits)} if limits else {}),
    }
    append(subject.run / "events.jsonl", event)
    return event


def append(path: Path, row: Row) -> None:
    """Append a row to a record that another process may be writing.

    Half a line that a killed process has left gets an end, so that this one stays whole; whoever
    writes there next mends it.

    Raises:
        OSError: It cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        line = b"\n" * torn + json.dumps(row, allow_nan=False).encode() + b"\n"
        if os.write(descriptor, line) < len(line):
            raise OSError(f"{path} took half of a row")
    finally:
        os.close(descriptor)
