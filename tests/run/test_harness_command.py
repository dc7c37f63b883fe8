"""`hlat evaluate` equals the harness's command `python -m lm_eval` for each task type.

Both evaluate the same folder and tasks. Items, metrics and printed values are compared.
"""

import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hlat[evaluation]'")
pytest.importorskip("accelerate", reason="the harness's own adapter needs accelerate")
from hlat.evaluate import __main__ as evaluate
from hlat.evaluate.evaluation_results import load_evaluated_models
from hlat.report.items_page import load_task_items
from tests.support.harness_items import compare_values, write_random_model

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the harness and what it imports
    pytest.mark.slow,  # runs the harness's command
]
MAX_LENGTH = 160
BOS, START, END = "<|bos|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROPORTIONS = {"acc", "acc_norm", "exact_match"}


def accuracy(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "training_split": "train",
    "test_split": "test",
    "fewshot_split": "train",
    "num_fewshot": 0,
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "metadata": {"version": 1.0},
}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "metric_list": accuracy("acc", "acc_norm"),
}
GENERATE = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n", "tree"], "max_gen_toks": 8, "do_sample": False},
    "filter_list": [
        {"name": "word", "filter": [{"function": "regex", "regex_pattern": "(\\w+)"}]},
        {"name": "all", "filter": [{"function": "take_first"}]},
    ],
    "metric_list": accuracy("exact_match"),
}
TASKS: dict[str, dict[str, Any]] = {
    "c_choice": CHOICE,
    "c_fewshot": {**CHOICE, "num_fewshot": 3, "description": "Choose one.\n\n"},
    "c_generate": GENERATE,
    "c_generate_fewshot": {**GENERATE, "num_fewshot": 2, "fewshot_delimiter": "\n###\n"},
    "c_prefix": {**GENERATE, "gen_prefix": "The answer is"},
    "c_likelihood": {
        "output_type": "loglikelihood",
        "doc_to_target": " {{choices[answer]}}",
        "target_delimiter": "",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            *accuracy("acc"),
        ],
    },
    "c_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name, "higher_is_better": False}
            for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
    },
}
CHAT_TASKS = ("c_choice", "c_fewshot", "c_generate", "c_generate_fewshot", "c_prefix")
SYSTEM = "Answer with été 木."
IDS = {"c_choice": [1, 4], "c_generate": [0, 2, 5]}


@dataclass(frozen=True)
class Case:
    """Tasks and settings of an evaluation, for both commands."""

    tasks: tuple[str, ...]
    harness: tuple[str, ...] = ()
    hlat: tuple[str, ...] = ()


CASES = {
    "plain": Case((*TASKS,)),
    "chat": Case(
        CHAT_TASKS,
        ("--apply_chat_template", "--system_instruction", SYSTEM),
        ("apply_chat_template=true", f"system_instruction={SYSTEM}"),
    ),
    "settings": Case(
        ("c_fewshot", "c_choice", "c_generate"),
        (
            *("--apply_chat_template", "--fewshot_as_multiturn", "false", "--seed", "1,2,3,4"),
            *("--gen_kwargs", "max_gen_toks=3,until=['a']", "--samples", json.dumps(IDS)),
        ),
        (
            *("apply_chat_template=true", "fewshot_as_multiturn=false", "seed=1,2,3,4"),
            *("gen_kwargs=max_gen_toks=3,until=['a']", f"doc_ids={json.dumps(IDS)}"),
        ),
    ),
    "length": Case(("c_choice", "c_rolling"), ("--limit", "5"), ("limit=5", "max_length=64")),
}
# The harness's command; it lists the tasks of --include_path only, which saves a minute
COMMANDS = """
import functools, json, sys
import lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
for words in json.loads(sys.argv[1]):
    sys.argv = ["lm_eval", *words]
    print("COMMAND", flush=True)
    cli_evaluate()
"""


def write_model(path: Path) -> None:
    """Write a random model with BOS in its tokenizer, and a chat template with special tokens."""
    write_random_model(path, MAX_LENGTH, (BOS, START, END), BOS)
    (path / "chat_template.jinja").write_text(TEMPLATE)


def write_tasks(folder: Path) -> None:
    """Write tasks with equal and empty choices, stray spaces, Unicode and over-long contexts."""
    rng = random.Random(0)
    vocabulary = [
        "river",
        "house",
        "été",
        "木",
        "  seven",
        "print(",
        "tree ",
        "of",
        "\tvalue",
        "🙂",
    ]

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(vocabulary, k=rng.randint(least, most)))

    rows = [
        {
            "question": text(3, 9),
            "choices": [text(1, 4) for _ in range(3)],
            "answer": rng.randrange(3),
            "text": text(5, 30),
        }
        for _ in range(16)
    ]
    rows[1]["choices"] = ["same", "same", "other"]
    rows[2]["question"] = "a long context " * 90
    rows[3] |= {"question": " stray spaces  ", "text": "  spaces around \n\n"}
    rows[4]["choices"] = ["", " ", "tree"]
    rows[5] |= {"question": "", "text": text(300, 300)}
    data = {"test": rows[:8], "train": rows[8:]}
    for split, part in data.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    files = {split: str(folder / f"{split}.jsonl") for split in data}
    for name, task in TASKS.items():
        content = {**COMMON, "task": name, "dataset_kwargs": {"data_files": files}, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))


@dataclass(frozen=True)
class Evaluated:
    """Directory with samples and results, and the printed text."""

    directory: Path
    printed: str

    def load_items(self, task: str) -> list[dict[str, Any]]:
        [file] = self.directory.glob(f"samples_{task}_2*.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]

    def load_results(self) -> dict[str, Any]:
        [file] = self.directory.glob("results_*.json")
        return dict(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("both")
    for name, write in (("model", write_model), ("tasks", write_tasks)):
        (path / name).mkdir()
        write(path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, Evaluated]:
    """Return the files and the output of the harness's command in each case."""
    calls = []
    for name, case in CASES.items():
        length = ",max_length=64" if name == "length" else ""
        calls.append(
            [
                *("--model", "hf", "--device", "cpu", "--batch_size", "4", "--log_samples"),
                *("--model_args", f"pretrained={folder / 'model'},dtype=float32{length}"),
                *("--include_path", str(folder / "tasks"), "--tasks", ",".join(case.tasks)),
                *("--output_path", str(folder / name), *case.harness),
            ]
        )
    environment = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(calls)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout.split("COMMAND\n")[1:]
    directories = [next((folder / name).iterdir()) for name in CASES]
    return dict(zip(CASES, map(Evaluated, directories, printed), strict=True))


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory) -> dict[str, Evaluated]:
    """Return the files and the output of `hlat evaluate` in each case."""
    import contextlib
    import io

    import datasets

    evaluated = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        for name, case in CASES.items():
            output = tmp_path_factory.mktemp(name) / "scores.json"
            arguments = [str(folder / "model"), f"tasks={','.join(case.tasks)}", f"output={output}"]
            arguments += [f"include_path={folder / 'tasks'}", "log_samples=true", *case.hlat]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                assert evaluate.main(arguments) == 0
            evaluated[name] = Evaluated(output.parent / "scores_harness", printed.getvalue())
    return evaluated


PAIRS = [(case, task) for case, each in CASES.items() for task in each.tasks]


@pytest.mark.parametrize(("case", "task"), PAIRS)
def test_items_are_equal(found, expected, case: str, task: str) -> None:
    items, others = found[case].load_items(task), expected[case].load_items(task)
    assert [item["doc_id"] for item in items] == [other["doc_id"] for other in others]
    for item, other in zip(items, others, strict=True):
        assert item.keys() == other.keys()
        compared = {"resps", "filtered_resps", *other["metrics"]}
        for key in compared:
            compare_values(item[key], other[key])
        for key in other.keys() - compared:
            assert item[key] == other[key], key


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_equal(found, expected, case: str) -> None:
    results, others = found[case].load_results(), expected[case].load_results()
    assert {*others["results"]} == {*CASES[case].tasks}
    for name, metrics in others["results"].items():
        assert results["results"][name] == pytest.approx(metrics, rel=1e-5, nan_ok=True), name
    for key in ("versions", "n-shot", "n-samples", "higher_is_better", "task_hashes"):
        assert results[key] == others[key], key
    for key in ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed"):
        assert results["config"][key] == others["config"][key]
    prompts = ("chat_template", "system_instruction")
    for key in (*prompts, *(f"{key}_sha" for key in prompts), "max_length"):
        assert results[key] == others[key], key


def test_the_page_shows_the_answers_that_the_metrics_count(found) -> None:
    """Include an empty choice, equal choices and stray spaces."""
    [model] = load_evaluated_models(found["plain"].directory.with_name("scores.json"))
    task = next(task for task in load_task_items([model]) if task.name == "c_choice")
    for item in task.by_model[0].values():
        for metric in ("acc", "acc_norm"):
            assert (item.predictions[metric] in item.gold) == (item.metrics[metric] == 1)


Printed = dict[tuple[str, str], list[tuple[str, str]]]
"""Printed values and errors of each filter, by task and metric."""


def parse_harness_table(printed: str) -> Printed:
    """Return the printed values of the harness."""
    values: Printed = {}
    task = ""
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[6].replace(".", "").isdigit():
            task = cells[0] or task
            values.setdefault((task, cells[4]), []).append((cells[6], cells[8]))
    return values


def parse_hlat_lines(printed: str) -> Printed:
    """Return the printed values of hlat, proportions as fractions of 1."""
    values: Printed = {}
    for line in re.findall(r"^  (c_\w+ .*)  of \d+$", printed, re.MULTILINE):
        task, _, rest = line.partition(" ")
        for metric, value, percent, error in re.findall(
            r"(\w+) ([\d.]+)(%?)(?: \(([\d.]+)\))?", rest
        ):
            scale = 0.01 if percent else 1.0
            texts = [f"{float(text) * scale:.4f}" if text else "N/A" for text in (value, error)]
            values.setdefault((task, metric), []).append((texts[0], texts[1]))
    return values


def compare_printed(text: str, other: str) -> None:
    """Compare to the decimals of the harness, which may round the values of a column."""
    if other == "N/A":
        assert text == other
        return
    num_decimals = len(other.partition(".")[2])
    # The fourth decimal of a large perplexity is beyond the precision of fp32
    margin = 0.5 * 10**-num_decimals + 1e-9
    assert float(text) == pytest.approx(float(other), rel=1e-5, abs=margin)


@pytest.mark.parametrize("case", CASES)
def test_printed_values_are_equal(found, expected, case: str) -> None:
    printed = parse_hlat_lines(found[case].printed)
    others = parse_harness_table(expected[case].printed)
    assert {task for task, _ in others} == {*CASES[case].tasks}
    assert printed.keys() == others.keys()
    for key, rows in others.items():
        for row, other in zip(sorted(printed[key]), sorted(rows), strict=True):
            compare_printed(row[0], other[0])
            if key[1] in PROPORTIONS:
                compare_printed(row[1], other[1])
