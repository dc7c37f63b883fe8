"""Scores of several models on all tasks with standard errors, and their paired differences.

Models with per-item output are compared item by item: the difference of a metric varies less over
the items than the scores of both models. p values are those of McNemar's exact test for metrics
that are 0 or 1, and of the t test otherwise, corrected for all comparisons (Holm).
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hlat.figures.page_templates import render_page
from hlat.report import evaluation_items
from hlat.report.evaluation_items import ItemKey, ScoreRow
from hlat.storage.durable_files import replace_file
from hlat.study.difference_format import format_p_value
from hlat.study.paired_test import (
    PairedDifference,
    PointRuns,
    adjust_p_values,
    compare_paired,
    compute_mcnemar_p_value,
)
from hlat.tracking.text_format import UNKNOWN, format_markdown_table, format_table, is_proportion

SUFFIXES = (".csv", ".md", ".html")
"""Formats of a file of tables."""
SCORE_CAPTION = "Scores (standard error), proportions in percent"
DIFFERENCE_CAPTION = "Differences (standard error), paired by item, proportions in percent"
MISSING_ITEMS = (
    "For paired differences, evaluate both models with log_samples=true and the same tasks."
)
_TEMPLATE = Path(__file__).with_name("templates") / "scores.html.j2"
_CSV_COLUMNS = (
    *("task", "metric", "filter", "shots", "items", "model", "value", "stderr"),
    *("baseline", "pairs", "difference", "difference_stderr", "low", "high", "p_holm"),
)
_TOLERANCE = 1e-6
_MIN_PAIRS = 2

Table = tuple[list[str], list[list[str]]]
ItemValues = dict[str, dict[tuple[str, ItemKey], float]]
"""Value of each item by metric; an item is a task with a key."""


@dataclass(frozen=True)
class MetricScore:
    """Metric of a task, as `metric,filter`, with value and standard error by model."""

    task: str
    metric: str
    shots: str
    num_items: int
    higher_is_better: bool | None
    values: list[float | None]
    errors: list[float | None]


@dataclass(frozen=True)
class ScoreDifference:
    """Difference of a model to the first one, over the items of both; p values are Holm's."""

    task: str
    metric: str
    model: str
    baseline: str
    difference: PairedDifference
    p_value: float

    @property
    def error(self) -> float:
        """Standard error of the mean difference."""
        return self.difference.std / math.sqrt(self.difference.num_pairs)


@dataclass(frozen=True)
class ScoreComparison:
    """Scores of models, with the differences of those that have items to the first such model."""

    models: list[str]
    scores: list[MetricScore]
    differences: list[ScoreDifference]


def compare_scores(models: Sequence[ScoreRow]) -> ScoreComparison:
    """Return all scores of models, and the differences to the first model with items."""
    names = _label_models(models)
    scores = _collect_scores(models)
    with_items = [i for i, model in enumerate(models) if evaluation_items.find_sample_files(model)]
    differences = _compare_items(models, names, scores, with_items) if len(with_items) > 1 else []
    return ScoreComparison(names, scores, differences)


def build_score_table(comparison: ScoreComparison) -> Table:
    """Return headers, and a row for each metric: scores, proportions in percent."""
    headers = ["Task", "Metric", "Shots", "Items", *comparison.models]
    rows = []
    for score in comparison.scores:
        cells = [
            _format_score(score.metric, value, error)
            for value, error in zip(score.values, score.errors, strict=True)
        ]
        rows.append(
            [score.task, _format_metric(score), score.shots, f"{score.num_items:,}", *cells]
        )
    return headers, rows


def build_difference_table(comparison: ScoreComparison) -> Table:
    """Return headers, and a row for each difference."""
    headers = ["Task", "Metric", "Models", "Items", "Difference", "95% interval", "p (Holm)"]
    rows = []
    for one in comparison.differences:
        difference = one.difference
        ends = difference.low, difference.high
        low, high = (_format_value(one.metric, end, "+") for end in ends)
        rows.append(
            [
                one.task,
                _shorten_metric(one.metric),
                f"{one.model} - {one.baseline}",
                f"{difference.num_pairs:,}",
                _format_score(one.metric, difference.mean, one.error, "+"),
                f"{low} to {high}",
                format_p_value(one.p_value),
            ]
        )
    return headers, rows


def format_scores(comparison: ScoreComparison) -> list[str]:
    """Return the tables for a terminal."""
    lines = [f"{SCORE_CAPTION}:", *format_table(*build_score_table(comparison))]
    if comparison.differences:
        table = build_difference_table(comparison)
        return [*lines, "", f"{DIFFERENCE_CAPTION}:", *format_table(*table)]
    return [*lines, "", MISSING_ITEMS] if len(comparison.models) > 1 else lines


def write_tables(comparison: ScoreComparison, paper_tables: Sequence[str], path: Path) -> None:
    """Write the tables as CSV, Markdown or HTML, depending on the suffix."""
    if path.suffix == ".csv":
        content = _format_csv(comparison)
    elif path.suffix == ".md":
        content = _format_markdown(comparison)
    else:
        content = _render_html(comparison, paper_tables)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.encode())


def _label_models(models: Sequence[ScoreRow]) -> list[str]:
    """Return the names of models; equal ones get the path of their scores."""
    names = [str(model["name"]) for model in models]
    return [
        f"{name} ({model['scores_path']})" if names.count(name) > 1 else name
        for name, model in zip(names, models, strict=True)
    ]


def _collect_scores(models: Sequence[ScoreRow]) -> list[MetricScore]:
    scores = []
    for task in dict.fromkeys(task for model in models for task in model["tasks"]):
        results = [model["tasks"].get(task, {}) for model in models]
        metrics = [metric for result in results for metric in _list_metrics(result)]
        known = [result for result in results if result]
        shots = dict.fromkeys(str(result.get("shots")) for result in known)
        for metric in dict.fromkeys(metrics):
            is_better = [
                result.get("higher_is_better", {}).get(metric.partition(",")[0]) for result in known
            ]
            scores.append(
                MetricScore(
                    task=task,
                    metric=metric,
                    shots=" or ".join(shots).replace("None", "mixed"),
                    num_items=max(result.get("questions", 0) for result in known),
                    higher_is_better=is_better[0],
                    values=[result.get("metrics", {}).get(metric) for result in results],
                    errors=[result.get("errors", {}).get(metric) for result in results],
                )
            )
    return scores


def _list_metrics(result: ScoreRow) -> list[str]:
    """Return the metric of the paper's tables, or all metrics of other tasks."""
    metrics = [*result.get("metrics", {})]
    return [result["counts"]] if result.get("counts") in metrics else metrics


def _compare_items(
    models: Sequence[ScoreRow],
    names: Sequence[str],
    scores: Sequence[MetricScore],
    with_items: Sequence[int],
) -> list[ScoreDifference]:
    """Return the differences to the first model with items.

    A metric is compared if its score is the mean of its items, unlike a perplexity.
    """
    baseline, *others = with_items
    compared = []
    for task in dict.fromkeys(score.task for score in scores):
        metrics = [score for score in scores if score.task == task]
        items = {i: _load_item_values(models[i], task) for i in with_items}
        for score in metrics:
            for i in others:
                pair = [(items[k].get(score.metric, {}), score.values[k]) for k in (i, baseline)]
                if all(_is_mean(values, value) for values, value in pair):
                    difference = _compare_values(pair[0][0], pair[1][0])
                    if difference.num_pairs >= _MIN_PAIRS:
                        compared.append((score, names[i], difference))
    p_values = adjust_p_values([difference.p_value for *_, difference in compared])
    return [
        ScoreDifference(score.task, score.metric, name, names[baseline], difference, p_value)
        for (score, name, difference), p_value in zip(compared, p_values, strict=True)
    ]


def _load_item_values(model: ScoreRow, task: str) -> ItemValues:
    values: ItemValues = {}
    for name, path in evaluation_items.find_sample_files(model, task).items():
        for key, item in evaluation_items.iterate_samples(path):
            for metric, value in evaluation_items.get_metric_values(item).items():
                values.setdefault(f"{metric},{key[2]}", {})[name, key] = value
    return values


def _is_mean(values: dict[tuple[str, ItemKey], float], score: float | None) -> bool:
    if not values or score is None:
        return False
    return math.isclose(sum(values.values()) / len(values), score, rel_tol=_TOLERANCE, abs_tol=1e-9)


def _compare_values(
    values: dict[tuple[str, ItemKey], float], baseline: dict[tuple[str, ItemKey], float]
) -> PairedDifference:
    point, other = (
        PointRuns({repr(key): value for key, value in each.items()}) for each in (values, baseline)
    )
    difference = compare_paired(point, other)
    common = values.keys() & baseline.keys()
    if not {*values.values(), *baseline.values()} <= {0.0, 1.0}:
        return difference
    differences = np.array([values[key] - baseline[key] for key in common])
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    return replace(difference, p_value=compute_mcnemar_p_value(gained, lost))


def _shorten_metric(metric: str) -> str:
    return metric.removesuffix(",none")


def _format_metric(score: MetricScore) -> str:
    arrow = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
    return f"{_shorten_metric(score.metric)}{arrow}"


def _format_value(metric: str, value: float, sign: str = "") -> str:
    if math.isnan(value):
        return UNKNOWN
    return f"{100 * value:{sign}.2f}" if is_proportion(metric) else f"{value:{sign}.4f}"


def _format_score(metric: str, value: float | None, error: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    text = _format_value(metric, value, sign)
    return text if error is None else f"{text} ({_format_value(metric, error)})"


def _format_markdown(comparison: ScoreComparison) -> str:
    parts = [(SCORE_CAPTION, build_score_table(comparison))]
    if comparison.differences:
        parts.append((DIFFERENCE_CAPTION, build_difference_table(comparison)))
    lines = []
    for caption, table in parts:
        lines += [f"{caption}:", "", *format_markdown_table(*table), ""]
    return "\n".join(lines)


def _format_csv(comparison: ScoreComparison) -> str:
    """Return a row for each metric and model, in fractions of 1, with its paired difference."""
    differences = {(one.task, one.metric, one.model): one for one in comparison.differences}
    output = io.StringIO()
    writer = csv.writer(output)
    writer.writerow(_CSV_COLUMNS)
    for score in comparison.scores:
        metric, _, metric_filter = score.metric.partition(",")
        for model, value, error in zip(comparison.models, score.values, score.errors, strict=True):
            row = [score.task, metric, metric_filter, score.shots, score.num_items, model]
            row += ["" if number is None else number for number in (value, error)]
            one = differences.get((score.task, score.metric, model))
            if one is not None:
                paired = one.difference
                row += [one.baseline, paired.num_pairs, paired.mean, one.error]
                row += [paired.low, paired.high, one.p_value]
            if value is not None:
                writer.writerow([*row, *[""] * (len(_CSV_COLUMNS) - len(row))])
    return output.getvalue()


def _render_html(comparison: ScoreComparison, paper_tables: Sequence[str]) -> str:
    headers, rows = build_score_table(comparison)
    difference_headers, difference_rows = build_difference_table(comparison)
    names = comparison.models
    return render_page(
        _TEMPLATE,
        title="Scores",
        name=" and ".join(names) if len(names) < 3 else f"{len(names)} models",
        score_caption=SCORE_CAPTION,
        columns=_style_columns(headers, 3),
        rows=rows,
        difference_caption=DIFFERENCE_CAPTION,
        difference_columns=_style_columns(difference_headers, 3),
        difference_rows=difference_rows,
        missing_items="" if difference_rows or len(names) < 2 else MISSING_ITEMS,
        paper_tables="\n".join(paper_tables),
    )


def _style_columns(headers: Sequence[str], first_number: int) -> list[tuple[str, str]]:
    styles = ["row name", *[""] * (first_number - 1)]
    return [(h, styles[i] if i < first_number else "number") for i, h in enumerate(headers)]
