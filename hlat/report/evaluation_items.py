"""Items of benchmark tasks from evaluations with log_samples=true, by task and model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hlat.config.config_errors import ConfigError

ScoreRow = dict[str, Any]
"""Scores of a model, as `evaluation_results.load_evaluated_models` returns them."""
ItemKey = tuple[str, int, str]
"""Hash of a document, number of earlier equal documents, and filter."""


_READ_ERRORS = (
    *(OSError, ValueError, LookupError, TypeError),
    *(AttributeError, OverflowError, RecursionError),
)
"""Errors of a file with another content than an evaluation writes."""
_CHOICE_METRICS = {"acc", "acc_norm", "acc_bytes", "acc_mutual_info"}
"""Metrics that are 1 if the best choice is correct."""


@dataclass(frozen=True)
class Item:
    """Answers of a model to a document of a task.

    Attributes:
        doc_id: Index of the document in its data set.
        filter: Filter of the answers.
        target: Correct answer, as text.
        metrics: Values of the metrics.
        prompt: Text before the answer, empty if the whole text is scored.
        choices: Answers to choose from, or one text that is scored.
        log_likelihoods: Log-likelihood of each choice.
        generated: Generated text.
        answer: Generated text after the filter.
        gold: Indices of the correct choices, if known.
        predictions: Index of the best choice by metric.
    """

    doc_id: int
    filter: str
    target: str
    metrics: dict[str, float]
    prompt: str = ""
    choices: list[str] = field(default_factory=list)
    log_likelihoods: list[float] = field(default_factory=list)
    generated: str = ""
    answer: str = ""
    gold: list[int] = field(default_factory=list)
    predictions: dict[str, int] = field(default_factory=dict)


def find_sample_files(model: ScoreRow, result_name: str | None = None) -> dict[str, Path]:
    """Return the file of the items of each task, or of those of one result, such as a group."""
    files = {}
    for name, result in model["tasks"].items():
        for task, file in result.get("sample_files", {}).items():
            if result_name in (None, name):
                files[task] = _resolve(model["scores_path"], file)
    return files


def load_items(path: Path, config: Mapping[str, Any]) -> dict[ItemKey, Item]:
    """Return the items of a file; `config` is the harness's configuration of the task.

    Raise ConfigError if the file cannot be read.
    """
    with _convert_errors(path):
        return {key: _parse_item(sample, config) for key, sample in iterate_samples(path)}


def load_task_configs(model: ScoreRow) -> dict[str, Any]:
    """Return the harness's configuration of each task, from the results files of a model."""
    names = {result.get("results_file") for result in model["tasks"].values()} - {None}
    configs: dict[str, Any] = {}
    for name in sorted(names):
        path = _resolve(model["scores_path"], name)
        with _convert_errors(path):
            configs |= json.loads(path.read_text())["configs"]
    return configs


def iterate_samples(path: Path) -> Iterator[tuple[ItemKey, dict[str, Any]]]:
    """Yield the lines of a file of items; raise ConfigError if it cannot be read."""
    counts: dict[tuple[str, str], int] = {}
    with _convert_errors(path), open(path, encoding="utf-8") as file:
        for line in file:
            sample = json.loads(line)
            key = str(sample["doc_hash"]), str(sample["filter"])
            counts[key] = count = counts.get(key, -1) + 1
            yield (key[0], count, key[1]), sample


def get_metric_values(sample: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an item that are numbers."""
    values = {name: sample.get(name) for name in sample["metrics"]}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, bool | int | float)
    }


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except _READ_ERRORS as error:
        raise ConfigError(
            f"{path} cannot be read ({error!r}); evaluate the model again with log_samples=true"
        ) from error


def _resolve(scores_path: Path, name: str) -> Path:
    """Return the path of a file that a scores file names; raise ConfigError if it is elsewhere."""
    if not isinstance(name, str) or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise ConfigError(f"{scores_path} refers to {name!r}, which is not in its directory")
    return scores_path.parent / name


def _parse_item(sample: Mapping[str, Any], config: Mapping[str, Any]) -> Item:
    requests = [[*request.values()] for request in sample["arguments"].values()]
    answers, has_prompt = sample["filtered_resps"], len(requests[0]) > 1
    item = Item(
        doc_id=int(sample["doc_id"]),
        filter=str(sample["filter"]),
        target=str(sample["target"]),
        metrics=get_metric_values(sample),
        prompt=str(requests[0][0]) if has_prompt else "",
    )
    if has_prompt and isinstance(requests[0][1], dict):  # settings of the generation
        return replace(item, generated=str(sample["resps"][0][0]), answer=str(answers[0]))
    log_likelihoods = [float(a[0] if isinstance(a, list) else a) for a in answers]
    choices = _list_choices(requests)
    if "acc_mutual_info" in item.metrics:  # the second half has no prompt
        choices = choices[: len(choices) // 2]
    predictions = {}
    if len(choices) > 1:
        delimiter = str(config.get("target_delimiter", " "))
        predictions = _predict(choices, log_likelihoods, delimiter, [*item.metrics])
    return replace(
        item,
        choices=choices,
        log_likelihoods=log_likelihoods[: len(choices)],
        gold=_find_gold(item.target, choices, item.metrics, predictions),
        predictions=predictions,
    )


def _list_choices(requests: Sequence[Sequence[Any]]) -> list[str]:
    """Return the part that differs between the requests: continuations, or contexts."""
    choices = [str(request[-1]) for request in requests]
    has_contexts = len(requests) > 1 and len({*choices}) == 1
    return [str(request[0]) for request in requests] if has_contexts else choices


def _predict(
    choices: Sequence[str], values: Sequence[float], delimiter: str, metrics: Sequence[str]
) -> dict[str, int]:
    """Return the best choice by metric; acc_norm and acc_bytes divide by the length."""
    log_likelihoods = np.array(values[: len(choices)])
    texts = [choice.removeprefix(delimiter) for choice in choices]
    characters = np.array([len(text) for text in texts])
    num_bytes = np.array([len(text.encode()) for text in texts])
    predictions = {}
    for metric in metrics:
        scores = log_likelihoods
        if metric in ("acc_norm", "acc_bytes"):
            lengths = characters if metric == "acc_norm" else num_bytes
            with np.errstate(divide="ignore", invalid="ignore"):  # a choice may be empty
                scores = log_likelihoods / lengths
        elif metric == "acc_mutual_info":
            scores = log_likelihoods - np.array(values[len(choices) :])
        predictions[metric] = int(np.argmax(scores))
    return predictions


def _find_gold(
    target: str,
    choices: Sequence[str],
    metrics: Mapping[str, float],
    predictions: Mapping[str, int],
) -> list[int]:
    """Return the indices of the correct choices; empty if they are not known."""
    if len(choices) < 2:
        return []
    correct = {predictions[name] for name in _CHOICE_METRICS & {*metrics} if metrics[name] == 1}
    if len(correct) == 1 and not target.startswith("["):
        found = [*correct]
    elif target.strip("[]").replace(",", "").replace(" ", "").isdecimal():
        found = [int(index) for index in target.strip("[]").split(",")]
    else:
        stripped = [choice.strip() for choice in choices]
        found = [stripped.index(target.strip())] if target.strip() in stripped else []
    return [index for index in found if index < len(choices)]
