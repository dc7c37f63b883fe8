"""Items of evaluated models, and their page."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hlat.config.config_errors import ConfigError
from hlat.evaluate.evaluation_results import load_evaluated_models
from hlat.report import __main__ as report
from hlat.report.evaluation_items import find_sample_files, load_items
from hlat.report.items_page import load_task_items
from tests.unit.report.item_files import ATTACK, write_model

NUM_ITEMS = 40


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [
        write_model(tmp_path / name, NUM_ITEMS, skill, seed)
        for seed, (name, skill) in enumerate({"a": 0.2, "b": 0.7}.items())
    ]


def read_data(page: str, name: str) -> dict[str, Any]:
    """Return the data of an element of a page."""
    [text] = re.findall(f'data-items="{name}">([^<]*)<', page)
    return dict(json.loads(gzip.decompress(base64.b64decode(text))))


def test_predictions_agree_with_the_metrics(models: list[Path]) -> None:
    [model] = load_evaluated_models(models[1])
    [task, _] = load_task_items([model])
    items = task.by_model[0].values()
    assert len(items) == NUM_ITEMS
    for item in items:
        assert item.gold == [2]
        for metric in ("acc", "acc_norm"):
            assert (item.predictions[metric] == 2) == (item.metrics[metric] == 1)
    assert any(item.predictions["acc"] != item.predictions["acc_norm"] for item in items)


def test_page_contains_the_items_of_both_models(
    models: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["samples", *map(str, models)]) == 0
    path = models[0].parent / "items.html"
    assert capsys.readouterr().out.strip() == str(path)
    page = path.read_text()
    assert ATTACK not in page
    assert read_data(page, "models") == {"models": ["a", "b"], "tasks": ["choice", "sums"]}
    choice = read_data(page, "task 0")
    assert len(choice["items"]) == NUM_ITEMS
    first = choice["items"][0]
    assert first["prompt"].endswith(ATTACK)
    assert [model["values"].keys() for model in first["models"]] == [{"acc", "acc_norm"}] * 2
    assert len(first["models"][0]["lls"]) == len(first["choices"]) == 3
    sums = read_data(page, "task 1")
    assert {item["filter"] for item in sums["items"]} == {"strict", "flexible"}
    assert sums["items"][0]["models"][0]["text"] == "I think\n#### 6"
    assert sums["items"][1]["models"][0]["answer"] == "6"


def test_items_are_paired_by_document(models: list[Path]) -> None:
    """Use a model with fewer and reordered items."""
    [model] = load_evaluated_models(models[1])
    path = find_sample_files(model)["choice"]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(reversed(lines[10:])))
    task = load_task_items([*load_evaluated_models(models[0]), model])[0]
    one, other = task.by_model
    assert (len(one), len(other)) == (NUM_ITEMS, NUM_ITEMS - 10)
    assert all(one[key].prompt == item.prompt for key, item in other.items())


def test_models_without_items_are_rejected(models: list[Path]) -> None:
    scores = models[0] / "evaluations/scores.json"
    row = json.loads(scores.read_text())
    for task in row["tasks"].values():
        del task["sample_files"]
    scores.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="log_samples=true"):
        load_task_items(load_evaluated_models(models[0]))
    row["tasks"]["choice"]["sample_files"] = {"choice": "../../secret.jsonl"}
    scores.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="not in its directory"):
        load_task_items(load_evaluated_models(models[0]))


def test_error_of_a_damaged_file_contains_its_name(models: list[Path]) -> None:
    [model] = load_evaluated_models(models[0])
    path = find_sample_files(model)["choice"]
    for line in ("{", "{}", '{"doc_hash": "x", "filter": "none", "metrics": 3}'):
        path.write_text(f"{line}\n")
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            load_items(path, {})
