"""Tasks of lm-evaluation-harness for the columns of the HLAT paper's tables.

The number of few-shot examples is the paper's (sections V and V-A). The paper does not state the
accuracy of its commonsense tasks and the parser of GSM8K's answers: its row of LLaMA-2 matches the
length-normalized accuracy, and the harness of its time parsed the text after `####`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskSpec:
    """Task of lm-evaluation-harness, or a pass@k of HumanEval.

    Attributes:
        name: Name of the task or group.
        shots: Few-shot examples; None: the default of the task.
        metric: Metric of the paper, as `metric,filter`.
    """

    name: str
    shots: int | None
    metric: str


@dataclass(frozen=True)
class TableColumn:
    """Column of the paper's tables: the mean of its tasks, in percent.

    `key` is used in scores files and events; `num_datasets` is the weight in the average.
    """

    key: str
    tasks: tuple[TaskSpec, ...]
    num_datasets: int = 0


_COMMONSENSE_TASKS = (
    *(TaskSpec(task, 0, "acc_norm,none") for task in ("piqa", "hellaswag")),
    TaskSpec("winogrande", 0, "acc,none"),
    *(TaskSpec(task, 0, "acc_norm,none") for task in ("arc_easy", "arc_challenge", "openbookqa")),
)
_WORLD_KNOWLEDGE_TASKS = tuple(
    TaskSpec(task, 5, "exact_match,remove_whitespace") for task in ("nq_open", "triviaqa")
)

COLUMNS = (
    TableColumn("mmlu", (TaskSpec("mmlu", 5, "acc,none"),), 1),
    TableColumn("cr", _COMMONSENSE_TASKS, 6),
    TableColumn("wk", _WORLD_KNOWLEDGE_TASKS, 2),
    TableColumn("rc", (TaskSpec("boolq", 0, "acc,none"),), 1),
    TableColumn("math", (TaskSpec("gsm8k", 8, "exact_match,strict-match"),), 1),
    TableColumn("pass@1", (TaskSpec("pass@1", 0, "pass@1,unbiased"),), 1),
    TableColumn("pass@10", (TaskSpec("pass@10", 0, "pass@10,unbiased"),)),
    TableColumn("bbh", (TaskSpec("bbh", 3, "exact_match,get-answer"),)),
    TableColumn("csp_en", (TaskSpec("crows_pairs_english", 0, "pct_stereotype,none"),)),
    TableColumn("csp_fr", (TaskSpec("crows_pairs_french", 0, "pct_stereotype,none"),)),
    TableColumn("tqa_mc1", (TaskSpec("truthfulqa_mc1", 0, "acc,none"),)),
    TableColumn("tqa_mc2", (TaskSpec("truthfulqa_mc2", 0, "acc,none"),)),
)
HUMANEVAL = "humaneval"
"""Task of pass@1 and pass@10. The harness's task of this name is not used, since it executes
generated code in its own process."""
HELDOUT = "heldout"
"""Task of the loss and the bits per byte on held-out text."""
OWN_TASKS = (HUMANEVAL, HELDOUT)
"""Tasks that hlat implements without lm-evaluation-harness."""
AVERAGE = "average"

TASK_SETS = {
    "hlat_table2": ("mmlu", "cr", "wk", "rc", "math"),
    "hlat_table5": ("csp_en", "csp_fr", "tqa_mc1", "tqa_mc2"),
    **{f"hlat_{column.key}": (column.key,) for column in COLUMNS if "@" not in column.key},
}
"""Columns by the name of a task set; Table IV has the columns of Table II."""


def list_tasks(names: Iterable[str]) -> list[TaskSpec]:
    """Return the unique tasks of task sets."""
    keys = {key for name in names for key in TASK_SETS[name]}
    return [spec for column in COLUMNS if column.key in keys for spec in column.tasks]


def compute_scores(
    measured: Mapping[str, tuple[float, float | None]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the columns with a result for every task, and their standard errors, in percent.

    `measured` contains the metric of each task and its standard error, if known, as fractions of 1.
    """
    scores, errors = {}, {}
    for column in COLUMNS:
        results = [measured[spec.name] for spec in column.tasks if spec.name in measured]
        if len(results) < len(column.tasks):
            continue
        scores[column.key] = 100 * sum(value for value, _ in results) / len(results)
        squares = [error**2 for _, error in results if error is not None]
        if len(squares) == len(results):
            errors[column.key] = 100 * math.sqrt(sum(squares)) / len(results)
    return scores, errors


def compute_average(scores: Mapping[str, float]) -> float | None:
    """Return the mean over the data sets of Table II, or None if a column but pass@10 is missing.

    The paper does not define its average: the mean over its twelve data sets yields 60.8 for
    HLAT-70B as printed, and not the printed value for all of the 7B rows.
    """
    weights = {column.key: column.num_datasets for column in COLUMNS if column.num_datasets}
    if not weights.keys() <= scores.keys():
        return None
    return sum(scores[key] * weight for key, weight in weights.items()) / sum(weights.values())
