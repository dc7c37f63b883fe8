"""Tasks in YAML files of the user."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hlat[evaluation]'")

from hlat.config.config_errors import ConfigError
from hlat.evaluate import lm_eval_tasks
from hlat.evaluate.lm_eval_tasks import TaskLoader

pytestmark = pytest.mark.filterwarnings("default")  # of the harness and what it imports


@pytest.fixture(autouse=True)
def _directories(tmp_path, monkeypatch):
    """Use a temporary directory for the cache of the datasets library and relative paths."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def write_task(folder: Path, name: str = "my_sums", **changes: Any) -> Path:
    """Write a multiple-choice task and its data, and return the YAML file."""
    folder.mkdir(exist_ok=True)
    rows = [{"question": f"{i} + 1 =", "options": ["2", "3"], "answer": i - 1} for i in (1, 2)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    file = folder / f"{name}.yaml"
    text = yaml.safe_dump({key: v for key, v in (config | changes).items() if v is not None})
    file.write_text(text.replace("'!function", "!function").replace("code.first'", "code.first"))
    return file


def load(*names: str, include_path: Path | None = None, data: Path | None = None) -> list[str]:
    """Return the names of the tasks that the names load."""
    loader = TaskLoader(data, include_path)
    loaded = [loader.load_task(spec) for spec in loader.resolve_tasks(names, None)]
    return [name for each in loaded for name in each["tasks"]]


@pytest.fixture
def without_harness_tasks(monkeypatch) -> None:
    """Fail if the tasks of the harness are listed, which is slow."""
    monkeypatch.setattr(TaskLoader, "_task_manager", None)


@pytest.mark.usefixtures("without_harness_tasks")
def test_load_a_file_and_tasks_of_a_directory(tmp_path) -> None:
    write_task(tmp_path / "tasks", tag="my_tag")
    write_task(tmp_path / "tasks", "other", tag="my_tag")
    assert load("tasks/my_sums.yaml") == ["my_sums"]
    assert load("other", include_path=tmp_path / "tasks") == ["other"]
    assert load("my_tag", include_path=tmp_path / "tasks") == ["my_sums", "other"]
    # The data of the file are local, although data= names another directory
    assert load("tasks/my_sums.yaml", data=tmp_path) == ["my_sums"]


@pytest.mark.usefixtures("without_harness_tasks")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"doc_to_txt": "{{question}}"},
            "doc_to_txt is not a key of a task; did you mean doc_to_t",
        ),
        ({"doc_to_text": "{{qestion}}"}, "doc_to_text: UndefinedError: 'qestion' is undefined"),
        ({"doc_to_target": "{{"}, "doc_to_target: TemplateSyntaxError"),
        ({"test_split": "tests"}, "test_split: KeyError: 'tests'; correct test_split"),
        ({"metric_list": [{"metric": "acuracy"}]}, "the harness has no metric acuracy; did you"),
        ({"dataset_kwargs": {"data_files": "no.jsonl"}}, "correct dataset_path or dataset_kwargs"),
        ({"doc_to_text": "!function code.first"}, "code"),
        ({"unsafe_code": True}, "my_sums executes code that the model wrote"),
        ({"task": None}, "tasks=tasks/my_sums.yaml"),
    ],
)
def test_errors_name_file_and_key(tmp_path, changes, expected) -> None:
    file = write_task(tmp_path / "tasks", **changes)
    with pytest.raises(ConfigError) as error:
        load("tasks/my_sums.yaml")
    assert expected in str(error.value)
    assert str(file) in str(error.value) or "tasks=" in str(error.value) or "unsafe" in expected


@pytest.mark.usefixtures("without_harness_tasks")
def test_functions_are_imported_when_a_task_is_loaded_only(tmp_path) -> None:
    write_task(tmp_path / "tasks", doc_to_text="!function code.first")
    (tmp_path / "tasks/code.py").write_text(
        "import pathlib\npathlib.Path('imported').touch()\ndef first(row):\n    return row['question']\n"
    )
    loader = TaskLoader(None, tmp_path / "tasks")
    specs = [*loader.resolve_tasks(["tasks/my_sums.yaml"], None)]
    assert loader.resolve_tasks(["my_sums"], None) == specs
    assert not Path("imported").exists()
    loader.load_task(specs[0])
    assert Path("imported").exists()


@pytest.mark.usefixtures("without_harness_tasks")
@pytest.mark.parametrize(("split", "available"), [("test", 1), ("validation", 2)])
def test_more_shots_than_documents_are_an_error(tmp_path, split: str, available: int) -> None:
    """Exclude the question itself if the examples are of the evaluated split."""
    rows = str(tmp_path / "tasks/rows.jsonl")
    files = {"data_files": {"test": rows, "validation": rows}}
    write_task(tmp_path / "tasks", dataset_kwargs=files, fewshot_split=split)
    loader = TaskLoader(None, tmp_path / "tasks")
    (spec,) = loader.resolve_tasks(["my_sums"], available)
    loader.load_task(spec)
    (spec,) = loader.resolve_tasks(["my_sums"], available + 1)
    with pytest.raises(ConfigError, match=f"shots={available + 1} exceeds the {available} doc"):
        loader.load_task(spec)


def test_an_unknown_name_lists_near_names_and_unreadable_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(TaskLoader, "_task_manager", SimpleNamespace(all_tasks=["boolq"]))
    folder = write_task(tmp_path / "tasks").parent
    (folder / "broken.yaml").write_text("task: [")
    loader = TaskLoader(None, folder)
    with pytest.raises(ConfigError) as error:
        loader.resolve_tasks(["my_sum"], None)
    assert "did you mean my_sums?" in str(error.value)
    assert f"{folder / 'broken.yaml'} cannot be read: ParserError" in str(error.value)


@pytest.mark.usefixtures("without_harness_tasks")
def test_wrong_locations_and_names_are_errors(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"tasks=no\.yaml: no\.yaml|No such file"):
        load("no.yaml")
    with pytest.raises(ConfigError, match="include_path=no is not a directory"):
        lm_eval_tasks.TaskLoader(None, Path("no"))
    folder = write_task(tmp_path / "tasks", "boolq").parent
    with pytest.raises(ConfigError, match="defines boolq again; rename it"):
        load("hlat_rc", include_path=folder)
