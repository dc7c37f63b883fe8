"""The paper's tasks: which of the harness's stands for each column of its tables.

Shots are the paper's (sections V and V-A). It says neither which accuracy its commonsense tasks
have nor how an answer to GSM8K is found: its row of LLaMA-2 fits the accuracy normalised by length,
and the harness of its time read what follows `####`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A task of the harness, or a number of HumanEval's, which is none of these.

    Attributes:
        task: Its name, or that of a group.
        shots: Examples before each question; None: as many as the task has by itself.
        metric: Which of its numbers counts, as metric,filter.
    """

    task: str
    shots: int | None
    metric: str


@dataclass(frozen=True)
class Column:
    """A number of the paper's tables: the plain mean of its tasks, in percent.

    Attributes:
        key: What records call it.
        title: What the tables call it.
        items: Its tasks.
        datasets: How many of the data sets that the average is over they are.
    """

    key: str
    title: str
    items: tuple[Item, ...]
    datasets: int = 0


_CR = (
    *(Item(task, 0, "acc_norm,none") for task in ("piqa", "hellaswag")),
    Item("winogrande", 0, "acc,none"),
    *(Item(task, 0, "acc_norm,none") for task in ("arc_easy", "arc_challenge", "openbookqa")),
)
_WK = tuple(Item(task, 5, "exact_match,remove_whitespace") for task in ("nq_open", "triviaqa"))

COLUMNS = (
    Column("mmlu", "MMLU", (Item("mmlu", 5, "acc,none"),), 1),
    Column("cr", "CR", _CR, 6),
    Column("wk", "WK", _WK, 2),
    Column("rc", "RC", (Item("boolq", 0, "acc,none"),), 1),
    Column("math", "Math", (Item("gsm8k", 8, "exact_match,strict-match"),), 1),
    Column("pass@1", "pass@1", (Item("pass@1", 0, "pass@1,unbiased"),), 1),
    Column("pass@10", "pass@10", (Item("pass@10", 0, "pass@10,unbiased"),)),
    Column("bbh", "BBH", (Item("bbh", 3, "exact_match,get-answer"),)),
    Column("csp_en", "CSP en", (Item("crows_pairs_english", 0, "pct_stereotype,none"),)),
    Column("csp_fr", "CSP fr", (Item("crows_pairs_french", 0, "pct_stereotype,none"),)),
    Column("tqa_mc1", "TQA mc1", (Item("truthfulqa_mc1", 0, "acc,none"),)),
    Column("tqa_mc2", "TQA mc2", (Item("truthfulqa_mc2", 0, "acc,none"),)),
)
HUMANEVAL = "humaneval"
"""The task that gives pass@1 and pass@10. The harness has one of this name, which is not asked: it
runs what the model wrote in its own process."""
AVERAGE = "average"

SETS = {
    "hlat_table2": ("mmlu", "cr", "wk", "rc", "math"),
    "hlat_table5": ("csp_en", "csp_fr", "tqa_mc1", "tqa_mc2"),
    **{f"hlat_{column.key}": (column.key,) for column in COLUMNS if "@" not in column.key},
}
"""Columns by the name of a set of tasks; those of Table IV are those of Table II."""


def items(names: Iterable[str]) -> list[Item]:
    """The tasks of some sets, each once."""
    keys = dict.fromkeys(key for name in names for key in SETS[name])
    return [item for column in COLUMNS if column.key in keys for item in column.items]


def scores(
    measured: Mapping[str, tuple[float, float | None]],
) -> tuple[dict[str, float], dict[str, float]]:
    """The paper's columns, in percent, of which every task was measured, and their errors.

    Args:
        measured: The number that counts of each task, and its standard error if that is known, as
            shares of 1.
    """
    found, errors = {}, {}
    for column in COLUMNS:
        own = [measured[item.task] for item in column.items if item.task in measured]
        if len(own) < len(column.items):
            continue
        found[column.key] = 100 * sum(value for value, _ in own) / len(own)
        known = [error for _, error in own if error is not None]
        if len(known) == len(own):
            errors[column.key] = 100 * math.sqrt(sum(error**2 for error in known)) / len(own)
    return found, errors


def average(known: Mapping[str, float]) -> float | None:
    """The mean over the data sets of Table II, if all of its columns but pass@10 are known.

    The paper does not say over what its average is: the mean over its twelve data sets gives HLAT's
    60.8 for 70B and not all of its 7B rows.
    """
    weights = {column.key: column.datasets for column in COLUMNS if column.datasets}
    if not set(weights) <= set(known):
        return None
    return sum(known[key] * weight for key, weight in weights.items()) / sum(weights.values())
