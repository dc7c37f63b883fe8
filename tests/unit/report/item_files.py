"""Scores and items of generated tasks in the format of log_samples=true."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

ATTACK = "\"'></script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
WORDS = ["river", "house", "été", "木", "seven", "print", "tree", "value"]


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def build_choice_item(index: int, skill: float, seed: int) -> dict[str, Any]:
    """Return a question with three choices; the last one is often correct for a high skill."""
    shared, own = random.Random(index), random.Random(1000 * seed + index)
    question = f"Question {index}: {' '.join(shared.choices(WORDS, k=6))}? Answer:"
    if index == 0:
        question += ATTACK
    choices = [" ".join(shared.choices(WORDS, k=k)) for k in (2, 2, 3)]
    log_likelihoods = [own.uniform(-9, -5) for _ in choices]
    if own.random() < skill:
        log_likelihoods[2] = -1.0
    normalized = [value / len(text) for value, text in zip(log_likelihoods, choices, strict=True)]
    best = log_likelihoods.index(max(log_likelihoods))
    best_normalized = normalized.index(max(normalized))
    answers = [[str(value), "False"] for value in log_likelihoods]
    return {
        "doc_id": index,
        "doc": {"question": question},
        "target": "2",
        "arguments": {
            f"gen_args_{i}": {"arg_0": question, "arg_1": f" {text}"}
            for i, text in enumerate(choices)
        },
        "resps": [[answer] for answer in answers],
        "filtered_resps": answers,
        "filter": "none",
        "metrics": ["acc", "acc_norm"],
        "doc_hash": hash_text(question),
        "prompt_hash": "p",
        "target_hash": "t",
        "acc": float(best == 2),
        "acc_norm": float(best_normalized == 2),
    }


def build_generated_items(index: int, answer: str) -> list[dict[str, Any]]:
    """Return an item for each of two filters; the target is 7."""
    prompt = f"Sum {index} ="
    text = f"I think\n#### {answer}"
    common = {
        "doc_id": index,
        "doc": {"question": prompt},
        "target": "7",
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": ["\n"]}}},
        "resps": [[text]],
        "metrics": ["exact_match"],
        "doc_hash": hash_text(prompt),
        "prompt_hash": "p",
        "target_hash": "t",
    }
    right = float(answer == "7")
    strict = {"filtered_resps": ["[invalid]"], "filter": "strict", "exact_match": 0.0}
    return [
        common | strict,
        common | {"filtered_resps": [answer], "filter": "flexible", "exact_match": right},
    ]


def write_model(directory: Path, num_items: int, skill: float, seed: int) -> Path:
    """Write a directory with the evaluation of a model on a choice task and a generated one."""
    items = {
        "choice": [build_choice_item(i, skill, seed) for i in range(num_items)],
        "sums": [
            row for i in range(4) for row in build_generated_items(i, str(6 + (i + seed) % 2))
        ],
    }
    files = directory / "evaluations/scores_harness"
    files.mkdir(parents=True)
    tasks = {}
    for name, rows in items.items():
        (files / f"samples_{name}_1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        metrics, errors = {}, {}
        for key in dict.fromkeys((m, row["filter"]) for row in rows for m in row["metrics"]):
            values = [row[key[0]] for row in rows if row["filter"] == key[1]]
            mean = sum(values) / len(values)
            metrics[",".join(key)] = mean
            errors[",".join(key)] = (mean * (1 - mean) / (len(values) - 1)) ** 0.5
        tasks[name] = {
            "metrics": metrics,
            "errors": errors,
            "shots": 0,
            "counts": "",
            "questions": num_items,
            "limit": None,
            "harness": "0.4.13",
            "higher_is_better": {key.partition(",")[0]: True for key in metrics},
            "sample_files": {name: f"scores_harness/samples_{name}_1.jsonl"},
            "results_file": "scores_harness/results_1.json",
        }
    configs = {"choice": {"target_delimiter": " "}, "sums": {}}
    (files / "results_1.json").write_text(json.dumps({"configs": configs}))
    row = {"name": "scores", "location": "/model", "step": None, "tokens": None}
    row |= {"scores": {}, "stderr": {}, "tasks": tasks}
    (directory / "evaluations/scores.json").write_text(json.dumps(row))
    return directory
