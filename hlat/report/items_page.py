"""Page of the items of benchmark tasks: prompts, choices and answers of one or several models.

The page contains the items of each task as compressed JSON, and its script shows a part of them, so
that it remains usable with tens of thousands of items. It needs no network.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.redaction import redact_text
from hlat.figures.page_templates import render_page
from hlat.report import evaluation_items
from hlat.report.evaluation_items import Item, ItemKey, ScoreRow
from hlat.storage.durable_files import replace_file

PAGE_NAME = "items.html"
_TEMPLATE = Path(__file__).with_name("templates") / "items.html.j2"
_END_OF_MAIN = "</main>"


@dataclass(frozen=True)
class TaskItems:
    """Items of a task by model, in the order of the models; empty for a model without them."""

    name: str
    by_model: list[dict[ItemKey, Item]]

    @property
    def metrics(self) -> list[str]:
        """Metrics of the items, in the harness's order."""
        items = (item for items in self.by_model for item in items.values())
        return list(dict.fromkeys(metric for item in items for metric in item.metrics))


def load_task_items(models: Sequence[ScoreRow]) -> list[TaskItems]:
    """Return the items of all tasks of evaluated models; raise ConfigError if there are none."""
    files = [evaluation_items.find_sample_files(model) for model in models]
    configs = [evaluation_items.load_task_configs(model) for model in models]
    tasks = []
    for name in dict.fromkeys(task for each in files for task in each):
        by_model = [
            evaluation_items.load_items(paths[name], config.get(name, {})) if name in paths else {}
            for paths, config in zip(files, configs, strict=True)
        ]
        tasks.append(TaskItems(name, by_model))
    if not tasks:
        names = ", ".join(str(model["scores_path"]) for model in models)
        raise ConfigError(
            f"{names}: no task has items; evaluate with log_samples=true, for example "
            "hlat evaluate MODEL tasks=hlat_cr log_samples=true"
        )
    return tasks


def write_items_page(models: Sequence[ScoreRow], output_dir: Path) -> Path:
    """Write the page of the items of evaluated models, and return its path."""
    models = [model for model in models if evaluation_items.find_sample_files(model)] or models
    tasks = load_task_items(models)
    names = [model["name"] for model in models]
    columns, rows = build_summary(tasks, names)
    page = render_page(
        _TEMPLATE,
        title="Items",
        name=" and ".join(names) if len(names) < 3 else f"{len(names)} models",
        columns=columns,
        rows=rows,
    )
    # The data are added after the redaction of the page, which could change compressed text
    data = [_compress({"models": names, "tasks": [task.name for task in tasks]}, "models")]
    data += [_compress(_build_task_data(task), f"task {i}") for i, task in enumerate(tasks)]
    page = page.replace(_END_OF_MAIN, "\n".join([_END_OF_MAIN, *data]), 1)
    path = output_dir / PAGE_NAME
    output_dir.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode())
    return path


def build_summary(
    tasks: Sequence[TaskItems], names: Sequence[str]
) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Return columns and rows: the mean of the first metric of each task, and changed items."""
    columns = [("Task", "row name"), ("Metric", ""), ("Items", "number")]
    columns += [(name, "number") for name in names]
    for name in names[1:]:
        columns += [(f"only {names[0]} right", "number"), (f"only {name} right", "number")]
    rows = []
    for task in tasks:
        metric = next(iter(task.metrics), "")
        values = [_select(items, metric) for items in task.by_model]
        count = max(map(len, values), default=0)
        row = [task.name, metric or "none", f"{count:,}"]
        row += [f"{sum(v.values()) / len(v):.4f}" if v else "n/a" for v in values]
        for other in values[1:]:
            pairs = [(values[0][key], other[key]) for key in values[0].keys() & other.keys()]
            row.append(f"{sum(one >= 1 > two for one, two in pairs):,}")
            row.append(f"{sum(two >= 1 > one for one, two in pairs):,}")
        rows.append(row)
    return columns, rows


def _select(items: Mapping[ItemKey, Item], metric: str) -> dict[ItemKey, float]:
    """Return the values of a metric, with the first filter that has it."""
    filters = dict.fromkeys(item.filter for item in items.values() if metric in item.metrics)
    first = next(iter(filters), "")
    return {
        key: item.metrics[metric]
        for key, item in items.items()
        if item.filter == first and metric in item.metrics
    }


def _build_task_data(task: TaskItems) -> dict[str, Any]:
    """Return the items of a task for the script; what models share is stored once."""
    keys = dict.fromkeys(key for items in task.by_model for key in items)
    rows = []
    for key in keys:
        found = [items.get(key) for items in task.by_model]
        first = next(item for item in found if item is not None)
        rows.append(
            {
                "id": first.doc_id,
                "filter": first.filter,
                "prompt": first.prompt,
                "target": first.target,
                "choices": first.choices,
                "gold": first.gold,
                "models": [None if item is None else _build_answer(item, first) for item in found],
            }
        )
    return {"name": task.name, "metrics": task.metrics, "items": rows}


def _build_answer(item: Item, first: Item) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "values": item.metrics,
        "lls": item.log_likelihoods,
        "best": item.predictions,
    }
    if not item.choices:
        answer |= {"text": item.generated, "answer": item.answer}
    if item.prompt != first.prompt:
        answer["prompt"] = item.prompt
    return answer


def _compress(content: dict[str, Any], name: str) -> str:
    """Return an element with compressed JSON that no browser runs or parses."""
    text = redact_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")))
    encoded = base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()
    return f'<script type="application/gzip" data-items="{name}">{encoded}</script>'
