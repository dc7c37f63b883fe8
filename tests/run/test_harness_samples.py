"""Per-item output and results files equal those of lm-evaluation-harness."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hlat[evaluation]'")
pytest.importorskip("accelerate", reason="the harness's own adapter needs accelerate")
import lm_eval
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hlat.evaluate import __main__ as evaluate
from hlat.evaluate import lm_eval_tasks
from tests.support.harness_items import compare_values, write_random_model

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the harness and what it imports
    pytest.mark.slow,  # imports transformers and the harness
]
NUM_ITEMS = 12
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "metadata": {"version": 2.0},
}
ACCURACIES = [
    {"metric": name, "aggregation": "mean", "higher_is_better": True}
    for name in ("acc", "acc_norm")
]
TASKS: dict[str, dict[str, Any]] = {
    "items_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": ACCURACIES,
    },
    "items_fewshot": {
        "output_type": "multiple_choice",
        "fewshot_split": "test",
        "num_fewshot": 2,
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": ACCURACIES[:1],
    },
    "items_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
        "filter_list": [
            {"name": "first-word", "filter": [{"function": "regex", "regex_pattern": "(\\w+)"}]},
            {"name": "all", "filter": [{"function": "take_first"}]},
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "items_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [
            {"metric": "word_perplexity", "higher_is_better": False},
            {"metric": "bits_per_byte", "higher_is_better": False},
        ],
    },
}
GROUP = {
    "group": "items_group",
    "task": ["items_choice", "items_fewshot"],
    "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    "metadata": {"version": 1.0},
}
NAMES = ["items_group", "items_generate", "items_rolling"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), max_length=96)


@pytest.fixture(scope="module")
def manager(tmp_path_factory) -> TaskManager:
    """Return generated tasks with odd items: equal choices, stray spaces, Unicode, long prompts."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(0)
    vocabulary = ["river", "house", "été", "木", "  seven", "print(", "tree ", "of", "\tvalue"]
    rows: list[dict[str, Any]] = [
        {
            "question": " ".join(rng.choices(vocabulary, k=rng.randint(3, 9))),
            "choices": [" ".join(rng.choices(vocabulary, k=rng.randint(1, 4))) for _ in range(3)],
            "answer": rng.randrange(3),
        }
        for _ in range(NUM_ITEMS)
    ]
    rows[1]["choices"] = ["same", "same", "other"]
    rows[2]["question"] = "a long prompt " * 40
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(data)}}
        content = {**COMMON, "task": name, "dataset_kwargs": files, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    (folder / "items_group.yaml").write_text(yaml.safe_dump(GROUP))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def expected(model, manager, tmp_path_factory) -> Path:
    """Return the directory of the harness's files."""
    output = tmp_path_factory.mktemp("harness")
    tracker = EvaluationTracker(output_path=str(output))
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1),
        tasks=NAMES,
        task_manager=manager,
        log_samples=True,
        evaluation_tracker=tracker,
    )
    assert results is not None
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    (directory,) = output.iterdir()
    return directory


@pytest.fixture(scope="module")
def written(model, manager, tmp_path_factory) -> Path:
    """Return the scores file of `hlat evaluate log_samples=true`."""
    path = tmp_path_factory.mktemp("hlat") / "scores.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval_tasks.TaskLoader, "_task_manager", manager)
        code = evaluate.main(
            [str(model), f"tasks={','.join(NAMES)}", f"output={path}", "log_samples=true"]
        )
    assert code == 0
    return path


def compute_answer_bits(items: list[dict[str, Any]]) -> float:
    """Return the mean bits per byte of the correct answers, from the files of the harness."""
    bits = []
    for item in items:
        answer = int(item["target"])
        text = item["arguments"][f"gen_args_{answer}"]["arg_1"]
        log_likelihood = float(item["resps"][answer][0][0])
        bits.append(-log_likelihood / math.log(2) / len(text.encode()))
    return sum(bits) / len(bits)


def load_items(directory: Path, task: str) -> list[dict[str, Any]]:
    [file] = directory.glob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def load_results(directory: Path) -> dict[str, Any]:
    [file] = directory.glob("results_*.json")
    return dict(json.loads(file.read_text()))


@pytest.mark.parametrize("task", TASKS)
def test_items_equal_those_of_the_harness(written, expected, task) -> None:
    items, others = load_items(written.parent / "scores_harness", task), load_items(expected, task)
    assert len(items) == NUM_ITEMS * (2 if task == "items_generate" else 1)
    for item, other in zip(items, others, strict=True):
        assert [*item] == [*other], "the same keys in the same order"
        values = {"resps", "filtered_resps", *other["metrics"]}
        for key in values:
            compare_values(item[key], other[key])
        assert {k: v for k, v in item.items() if k not in values} == {
            k: v for k, v in other.items() if k not in values
        }


def test_results_have_the_keys_and_values_of_the_harness(written, expected, model) -> None:
    found, other = load_results(written.parent / "scores_harness"), load_results(expected)
    for key in ("group_subtasks", "configs", "versions", "n-shot", "n-samples"):
        assert found[key] == other[key], key
    for key in ("higher_is_better", "task_hashes", "lm_eval_version", "transformers_version"):
        assert found[key] == other[key], key
    assert found["results"].keys() == other["results"].keys()
    for name, metrics in other["results"].items():
        counts = metrics.pop("sample_count", None)
        assert found["results"][name].pop("sample_count", None) == counts
        assert found["results"][name] == pytest.approx(metrics, rel=1e-5), name
    same = ("model_num_parameters", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
    assert {key: found["config"][key] for key in same} == {k: other["config"][k] for k in same}
    assert found["config"]["model_args"]["pretrained"] == str(model)
    assert (found["max_length"], found["eot_token_id"]) == (96, other["eot_token_id"])


def test_scores_refer_to_the_files(written) -> None:
    tasks = json.loads(written.read_text())["tasks"]
    hashes = load_results(written.parent / "scores_harness")["task_hashes"]
    assert tasks.keys() == {*NAMES}
    assert tasks["items_group"]["version"] == "1.0"
    directions = {"acc": True, "acc_norm": True, "answer_bits_per_byte": False}
    assert tasks["items_group"]["higher_is_better"] == directions
    subtasks = GROUP["task"]
    assert tasks["items_group"]["task_hashes"] == {name: hashes[name] for name in subtasks}
    for name, file in tasks["items_group"]["sample_files"].items():
        assert f"/samples_{name}_" in file
        assert (written.parent / file).is_file()
    for name in NAMES[1:]:
        assert tasks[name]["sample_files"].keys() == {name}
        assert (written.parent / tasks[name]["results_file"]).is_file()


def test_items_are_written_only_on_request(model, manager, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lm_eval_tasks.TaskLoader, "_task_manager", manager)
    path = tmp_path / "scores.json"
    arguments = [str(model), "tasks=items_choice", f"output={path}", "limit=2"]
    assert evaluate.main(arguments) == 0
    [file] = (tmp_path / "scores_harness").iterdir()
    assert file.name.startswith("results_")
    [task] = json.loads(path.read_text())["tasks"].values()
    assert "sample_files" not in task
    assert task["task_hashes"].keys() == {"items_choice"}


def test_an_interrupted_write_leaves_no_file(model, manager, tmp_path, monkeypatch) -> None:
    from hlat.evaluate import harness_files

    serialize, count = harness_files._serialize_sample, 0

    def interrupt(sample: dict[str, Any]) -> str:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        return serialize(sample)

    monkeypatch.setattr(harness_files, "_serialize_sample", interrupt)
    monkeypatch.setattr(lm_eval_tasks.TaskLoader, "_task_manager", manager)
    path = tmp_path / "scores.json"
    arguments = [str(model), "tasks=items_choice", f"output={path}", "limit=2", "log_samples=true"]
    with pytest.raises(KeyboardInterrupt):
        evaluate.main(arguments)
    assert not path.exists()
    assert not [*(tmp_path / "scores_harness").glob("samples_*")]


def test_answer_bits_per_byte(expected, written):
    """Compare with the log-likelihoods of the harness's own model."""
    items = [item for name in GROUP["task"] for item in load_items(expected, name)]
    tasks = json.loads(written.read_text())["tasks"]
    found = tasks["items_group"]["metrics"]["answer_bits_per_byte,none"]
    assert found == pytest.approx(compute_answer_bits(items), rel=1e-5)
    assert tasks["items_group"]["errors"]["answer_bits_per_byte,none"] > 0
    for name in ("items_generate", "items_rolling"):
        assert "answer_bits_per_byte,none" not in tasks[name]["metrics"]
