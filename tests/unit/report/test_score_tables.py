"""Scores of several models in one table, and their paired differences."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from hlat.evaluate.evaluation_results import load_evaluated_models
from hlat.report import __main__ as report
from hlat.report.score_tables import ScoreComparison, compare_scores
from tests.unit.report.item_files import build_choice_item, write_model

NUM_ITEMS = 60
SKILLS = {"a": 0.2, "b": 0.7}


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [
        write_model(tmp_path / name, NUM_ITEMS, skill, seed)
        for seed, (name, skill) in enumerate(SKILLS.items())
    ]


def compare(models: list[Path]) -> ScoreComparison:
    return compare_scores([row for path in models for row in load_evaluated_models(path)])


def get_accuracies(metric: str) -> list[Any]:
    return [
        np.array([build_choice_item(i, skill, seed)[metric] for i in range(NUM_ITEMS)])
        for seed, skill in enumerate(SKILLS.values())
    ]


def edit_scores(directory: Path, **changes: Any) -> None:
    """Change the result of the choice task."""
    path = directory / "evaluations/scores.json"
    row = json.loads(path.read_text())
    row["tasks"]["choice"] |= changes
    path.write_text(json.dumps(row))


def test_differences_equal_those_of_scipy(models: list[Path]) -> None:
    comparison = compare(models)
    by_metric = {(one.task, one.metric): one for one in comparison.differences}
    assert [*by_metric] == [
        *(("choice", "acc,none"), ("choice", "acc_norm,none")),
        *(("sums", "exact_match,strict"), ("sums", "exact_match,flexible")),
    ]
    p_values = []
    for metric in ("acc", "acc_norm"):
        one, other = get_accuracies(metric)
        result = by_metric["choice", f"{metric},none"]
        expected = stats.ttest_rel(other, one)
        interval = expected.confidence_interval(0.95)
        found = result.difference
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
        assert found.mean == pytest.approx(np.mean(other) - np.mean(one))
        assert result.error == pytest.approx(stats.sem(other - one))
        gained, lost = int((other > one).sum()), int((other < one).sum())
        p_values.append(stats.binomtest(gained, gained + lost).pvalue)
        assert found.p_value == pytest.approx(p_values[-1])
    smallest = by_metric["choice", ("acc,none", "acc_norm,none")[int(np.argmin(p_values))]]
    assert smallest.p_value == pytest.approx(min(1, 4 * min(p_values))), "Holm, four comparisons"


def test_only_common_items_are_paired(models: list[Path]) -> None:
    [path] = (models[1] / "evaluations/scores_harness").glob("samples_choice_*")
    rows = [json.loads(line) for line in path.read_text().splitlines()][20:]
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    means = {f"{m},none": float(np.mean([row[m] for row in rows])) for m in ("acc", "acc_norm")}
    edit_scores(models[1], metrics=means)
    first = compare(models).differences[0]
    one, other = (values[20:] for values in get_accuracies("acc"))
    assert first.difference.num_pairs == NUM_ITEMS - 20
    assert first.difference.mean == pytest.approx(np.mean(other - one))


def test_only_means_of_items_are_compared(models: list[Path]) -> None:
    edit_scores(models[0], metrics={"acc,none": 0.99, "acc_norm,none": 0.5})
    assert {one.task for one in compare(models).differences} == {"sums"}


def test_tables_for_the_terminal(models: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["tables", *map(str, models)]) == 0
    out = capsys.readouterr().out
    accuracy = [100 * np.mean(values) for values in get_accuracies("acc")]
    line = next(line for line in out.splitlines() if line.startswith("choice") and " acc ↑" in line)
    for value in accuracy:
        error = math.sqrt(value * (100 - value) / (NUM_ITEMS - 1))
        assert f"{value:.2f} ({error:.2f})" in line
    assert f"{accuracy[1] - accuracy[0]:+.2f} (" in out
    assert "b - a" in out
    assert "Table II." in out, "the paper's tables"


def test_tables_without_items_contain_a_remedy(
    models: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (models[1] / "evaluations").glob("*.json"):
        row = json.loads(file.read_text())
        for task in row["tasks"].values():
            del task["sample_files"]
        file.write_text(json.dumps(row))
    assert report.main(["tables", *map(str, models)]) == 0
    out = capsys.readouterr().out
    assert "log_samples=true" in out
    assert "b - a" not in out


def test_tables_as_files(models: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    paths = {suffix: models[0] / f"tables{suffix}" for suffix in (".csv", ".md", ".html")}
    for path in paths.values():
        assert report.main(["tables", *map(str, models), f"output={path}"]) == 0
        assert capsys.readouterr().out == f"{path}\n"
    with open(paths[".csv"]) as file:
        rows = [*csv.DictReader(file)]
    one, other = get_accuracies("acc")
    found = next(row for row in rows if (row["metric"], row["model"]) == ("acc", "b"))
    assert float(found["value"]) == pytest.approx(np.mean(other))
    assert float(found["difference"]) == pytest.approx(np.mean(other - one))
    assert (found["baseline"], found["pairs"]) == ("a", str(NUM_ITEMS))
    assert "| choice | acc ↑ | 0 |" in paths[".md"].read_text()
    page = paths[".html"].read_text()
    assert "McNemar" in page
    assert f"{100 * np.mean(other - one):+.2f} (" in page
    assert report.main(["tables", str(models[0]), "output=tables.pdf"]) == 2
    assert ".csv, .md, .html" in capsys.readouterr().err
