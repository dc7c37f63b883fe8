"""Time of 936 MMLU requests with `hlat evaluate` and with `python -m lm_eval`, alternately.

Usage: OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/evaluation/mmlu.py [--repetitions N]
       PYTHONPATH=. python benchmarks/evaluation/mmlu.py --render   (from mmlu.json)

Both commands evaluate the same model on the same data, in new processes with the same number of
threads: 234 documents in the format of MMLU with 4 choices, after 5 examples. The task is a YAML
file of the harness. The harness gets batches of 1 and of 8, and the faster one is the peer. Each
repetition verifies that all accuracies and log-likelihoods agree. The whole time of a process
includes imports; the time of the evaluation excludes them, the model and the data.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from benchmarks.common import describe_machine, machine, spread, table, write_between
from benchmarks.evaluation.run import make_model
from tests.run.questions import WORDS

HERE = Path(__file__).resolve().parent
DOCUMENTS, CHOICES, SHOTS, BATCHES = 234, 4, 5, (1, 8)
TASK: dict[str, Any] = {
    "task": "mmlu_generated",
    "dataset_path": "json",
    "test_split": "test",
    "fewshot_split": "dev",
    "fewshot_config": {"sampler": "first_n"},
    "num_fewshot": SHOTS,
    "output_type": "multiple_choice",
    "description": "The following are multiple choice questions (with answers).\n\n",
    "doc_to_text": "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\n"
    "C. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:",
    "doc_to_choice": ["A", "B", "C", "D"],
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
# Prints the seconds between the first and the last request of the harness's adapter
HARNESS = """
import functools, sys, time
import lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
from lm_eval.models.huggingface import HFLM
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
ask = HFLM.loglikelihood
def timed(self, requests, **options):
    since = time.perf_counter()
    answers = ask(self, requests, **options)
    print("SECONDS", time.perf_counter() - since, len(requests), flush=True)
    return answers
HFLM.loglikelihood = timed
sys.argv[0] = "lm_eval"
cli_evaluate()
"""
HLAT = """
import sys, time
from lm_eval.api.model import TemplateLM
from hlat.evaluate.__main__ import main
ask = TemplateLM.loglikelihood
def timed(self, requests, **options):
    since = time.perf_counter()
    answers = ask(self, requests, **options)
    print("SECONDS", time.perf_counter() - since, len(requests), flush=True)
    return answers
TemplateLM.loglikelihood = timed
sys.exit(main(sys.argv[1:]))
"""
Json = dict[str, Any]


def write_task(folder: Path, num_documents: int) -> None:
    """Write the task and documents of random words with about the length of those of MMLU."""
    rng = random.Random(0)

    def row() -> Json:
        choices = [" ".join(rng.choices(WORDS, k=rng.randint(2, 10))) for _ in range(CHOICES)]
        question = " ".join(rng.choices(WORDS, k=rng.randint(8, 40)))
        return {"question": question, "choices": choices, "answer": rng.randrange(CHOICES)}

    files = {}
    for split, count in (("test", num_documents), ("dev", SHOTS)):
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row()) + "\n" for _ in range(count)))
    content = TASK | {"dataset_kwargs": {"data_files": files}}
    (folder / "mmlu_generated.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def run(code: str, arguments: list[str], folder: Path, output: Path) -> Json:
    """Run a command in a new process; return its seconds and the responses of all requests."""
    environment = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    whole = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    [line] = [line for line in done.stdout.splitlines() if line.startswith("SECONDS")]
    _, seconds, count = line.split()
    [file] = output.rglob("samples_*.jsonl")
    items = [json.loads(row) for row in file.read_text().splitlines()]
    answers = [float(pair[0][0]) for item in items for pair in item["resps"]]
    accuracy = sum(item["acc"] for item in items) / len(items)
    return {
        "whole": whole,
        "evaluation": float(seconds),
        "requests": int(count),
        "answers": answers,
        "accuracy": accuracy,
    }


def measure(repetitions: int, num_documents: int) -> Json:
    """Alternate the commands; the first round is a warm-up."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(folder / "model")
        write_task(folder, num_documents)
        harness = ["--model", "hf", "--device", "cpu", "--log_samples", "--tasks", TASK["task"]]
        harness += ["--model_args", f"pretrained={model},dtype=float32"]
        harness += ["--include_path", str(folder)]
        hlat = [str(model), f"tasks={TASK['task']}", f"include_path={folder}", "log_samples=true"]
        seconds: dict[str, dict[str, list[float]]] = {}
        difference, found = 0.0, {}
        for repetition in range(repetitions + 1):
            for name in ("hlat", *(f"lm_eval, batches of {size}" for size in BATCHES)):
                output = folder / f"{name[:4]}_{repetition}_{name.rpartition(' ')[2]}"
                if name == "hlat":
                    found[name] = run(HLAT, [*hlat, f"output={output}/scores.json"], folder, output)
                else:
                    size = ["--batch_size", name.rpartition(" ")[2], "--output_path", str(output)]
                    found[name] = run(HARNESS, [*harness, *size], folder, output)
                times = seconds.setdefault(name, {"whole": [], "evaluation": []})
                if repetition:
                    for key, values in times.items():
                        values.append(found[name][key])
            for name, other in found.items():
                assert other["accuracy"] == found["hlat"]["accuracy"], name
                pairs = zip(found["hlat"]["answers"], other["answers"], strict=True)
                difference = max(difference, *(abs(a - b) / abs(b) for a, b in pairs))
            print(f"repetition {repetition} of {repetitions}", flush=True)
        result: Json = {
            "requests": found["hlat"]["requests"],
            "accuracy": found["hlat"]["accuracy"],
            "largest_relative_difference": difference,
            "seconds": seconds,
            "times_as_fast": {},
            "threads": torch.get_num_threads(),
            "machine": describe_machine(["torch", "transformers", "lm_eval"]),
        }
    for key in ("evaluation", "whole"):
        peers = [name for name in seconds if name != "hlat"]
        peer = min(peers, key=lambda name: spread(seconds[name][key])["median"])
        pairs = zip(seconds["hlat"][key], seconds[peer][key], strict=True)
        ratios = spread([theirs / ours for ours, theirs in pairs])
        result["times_as_fast"][key] = ratios | {"peer": peer}
    return result


def render(result: Json) -> None:
    """Write the table into the README."""
    rows = []
    for key, label in (("evaluation", "requests only"), ("whole", "whole command")):
        fast = result["times_as_fast"][key]
        medians = [spread(result["seconds"][n][key])["median"] for n in ("hlat", fast["peer"])]
        ratio = f"**{fast['median']:.2f}** ({fast['min']:.2f} to {fast['max']:.2f})"
        rows.append([label, f"{medians[0]:.3g}", f"{medians[1]:.3g} ({fast['peer']})", ratio])
    head = ["time", "hlat, s", "harness, s", "times as fast"]
    count, difference = result["requests"], result["largest_relative_difference"]
    note = f"{count} requests; largest relative difference of a log-likelihood {difference:.0e}."
    text = f"{table(head, rows)}\n\n{note} {machine(result)}"
    write_between(HERE / "README.md", "mmlu", text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--output", type=Path, default=HERE / "mmlu.json")
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    if not arguments.render:
        result = measure(arguments.repetitions, arguments.documents)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result["times_as_fast"], indent=2))
    if arguments.output == HERE / "mmlu.json":
        render(json.loads(arguments.output.read_text()))


if __name__ == "__main__":
    main()
