"""Small copies of the data sets of the paper's tasks, with the layout and schema of the hub.

The rows contain random words; the task files of the harness read them like the original data.
"""

import json
import random
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, Any]

WORDS = [
    "the",
    "river",
    "return",
    "value",
    "of",
    "list",
    "under",
    "house",
    "green",
    "def",
    "import",
    "class",
    "tree",
    "number",
    "seven",
    "print",
    "water",
    "because",
    "while",
    "long",
    "cat",
    "open",
    "file",
    "data",
    "small",
    "north",
    "table",
    "often",
]
SPLITS = ("train", "validation", "test")


class RandomText:
    """Generator of random text."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self, least: int = 3, most: int = 9) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(least, most)))

    def texts(self, count: int) -> list[str]:
        return [self.text() for _ in range(count)]

    def choice(self, count: int) -> int:
        return self.random.randrange(count)


def _mmlu(random_text: RandomText) -> Row:
    return {
        "question": random_text.text(),
        "choices": random_text.texts(4),
        "answer": random_text.choice(4),
    }


def _piqa(random_text: RandomText) -> Row:
    return {
        "goal": random_text.text(),
        "sol1": random_text.text(),
        "sol2": random_text.text(),
        "label": random_text.choice(2),
    }


def _hellaswag(random_text: RandomText) -> Row:
    return {
        "activity_label": "Washing [header] dishes",
        "ctx_a": random_text.text(),
        "ctx_b": random_text.text(0, 3),
        "endings": [f"{text} [title] {random_text.text()}." for text in random_text.texts(4)],
        "label": str(random_text.choice(4)),
    }


def _winogrande(random_text: RandomText) -> Row:
    return {
        "sentence": f"{random_text.text()} _ {random_text.text()}.",
        "option1": random_text.text(1, 1),
        "option2": random_text.text(1, 1),
        "answer": str(1 + random_text.choice(2)),
    }


def _arc(random_text: RandomText, question: str = "question") -> Row:
    labels = ["A", "B", "C", "D"]
    return {
        question: random_text.text(),
        "choices": {"text": random_text.texts(4), "label": labels},
        "answerKey": labels[random_text.choice(4)],
    }


def _openbookqa(random_text: RandomText) -> Row:
    return _arc(random_text, "question_stem")


def _nq_open(random_text: RandomText) -> Row:
    return {"question": random_text.text(), "answer": random_text.texts(2)}


def _triviaqa(random_text: RandomText) -> Row:
    aliases = random_text.texts(3)
    return {"question": random_text.text(), "answer": {"aliases": aliases, "value": aliases[0]}}


def _gsm8k(random_text: RandomText) -> Row:
    return {
        "question": random_text.text(),
        "answer": f"{random_text.text()}\n#### {random_text.choice(100)}",
    }


def _boolq(random_text: RandomText) -> Row:
    return {
        "passage": random_text.text(10, 30),
        "question": random_text.text(),
        "label": random_text.choice(2),
    }


def _truthful_qa(random_text: RandomText) -> Row:
    targets = {
        f"mc{i}_targets": {"choices": random_text.texts(4), "labels": labels}
        for i, labels in ((1, [1, 0, 0, 0]), (2, [1, 1, 0, 0]))
    }
    return {"question": random_text.text(), **targets}


def _crows_pairs(random_text: RandomText) -> Row:
    return {"sent_more": random_text.text(), "sent_less": random_text.text(), "bias_type": "age"}


def _bbh(random_text: RandomText) -> Row:
    return {"input": random_text.text(), "target": random_text.text(1, 1)}


def _subjects(folder: str, pattern: str) -> list[str]:
    """Return the subset names in the harness's task files, without evaluating YAML tags."""
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    files = Path(spec.submodule_search_locations[0], "tasks", folder).glob(pattern)
    lines = [line for file in sorted(files) for line in file.read_text().splitlines()]
    named = [line for line in lines if line.strip('"').startswith("dataset_name")]
    return sorted({yaml.safe_load(line)["dataset_name"] for line in named})


def write(folder: Path, rows: int = 2, names: Collection[str] | None = None) -> Path:
    """Write data sets into a folder and return it.

    Args:
        folder: Folder, which is created.
        rows: Number of rows of each split; splits with few-shot examples have ten.
        names: Names of the data sets; None: all.
    """
    datasets: dict[str, tuple[list[str | None], Callable[[RandomText], Row]]] = {
        "cais/mmlu": ([*_subjects("mmlu/default", "mmlu_*.yaml")], _mmlu),
        "baber/piqa": ([None], _piqa),
        "Rowan/hellaswag": ([None], _hellaswag),
        "allenai/winogrande": (["winogrande_xl"], _winogrande),
        "allenai/ai2_arc": (["ARC-Easy", "ARC-Challenge"], _arc),
        "allenai/openbookqa": (["main"], _openbookqa),
        "google-research-datasets/nq_open": ([None], _nq_open),
        "mandarjoshi/trivia_qa": (["rc.nocontext"], _triviaqa),
        "openai/gsm8k": (["main"], _gsm8k),
        "aps/super_glue": (["boolq"], _boolq),
        "truthfulqa/truthful_qa": (["multiple_choice"], _truthful_qa),
        "jannalu/crows_pairs_multilingual": (["english", "french"], _crows_pairs),
        "SaylorTwift/bbh": ([*_subjects("bbh/cot_fewshot", "*.yaml")], _bbh),
    }
    for seed, (name, (subsets, make)) in enumerate(datasets.items()):
        if names is None or name in names:
            _write(folder / name, subsets, make, RandomText(seed), rows)
    return folder


def _write(
    folder: Path,
    subsets: list[str | None],
    make: Callable[[RandomText], Row],
    random_text: RandomText,
    rows: int,
) -> None:
    """Write a data set with the layout of the hub: files of rows, and a README that lists them."""
    folder.mkdir(parents=True)
    configs = []
    for subset in subsets:
        files = []
        for split in (*SPLITS, "dev"):
            path = folder / (subset or "data") / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            count = 10 if split in ("train", "dev") else rows
            path.write_text("".join(json.dumps(make(random_text)) + "\n" for _ in range(count)))
            files.append({"split": split, "path": str(path.relative_to(folder))})
        configs.append({"config_name": subset or "default", "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
