"""Tables II, IV and V of the HLAT paper with the scores of the user's models.

Baselines are partly copied from the papers of LLaMA, which used another harness, so that not all of
them can be reproduced. The paper swaps the headers RC and CR of Table IV, as a comparison with
Table II shows; the columns here are in the correct order.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.evaluate.evaluation_results import load_scores
from hlat.evaluate.paper_tasks import AVERAGE, COLUMNS
from hlat.tracking.run_directory import EVALUATIONS_DIR

_COLUMN_TITLES = {column.key: column.title for column in COLUMNS} | {AVERAGE: "Avg."}
_NAME_WIDTH = 34


@dataclass(frozen=True)
class PaperTable:
    """Table of the paper, in percent.

    `columns` are keys of `hlat.evaluate.paper_tasks`. A row contains model, number of parameters
    and the score of each column; None: not printed.
    """

    number: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


TABLES = (
    PaperTable(
        "II",
        "Evaluation against open-source models",
        ("mmlu", "cr", "wk", "rc", "math", "pass@1", "pass@10", "average"),
        (
            ("OpenLLaMA-1", "7B", 30.5, 58.4, 40.6, 70.5, 5.2, 4.5, 13.4, 41.2),
            ("OpenLLaMA-2", "7B", 41.1, 61.3, 37.9, 72.4, 6.8, 9.7, 25.0, 44.9),
            ("LLaMA-1", "7B", 35.1, 63.5, 43.6, 76.5, 11.0, 10.5, 21.3, 47.4),
            ("LLaMA-2", "7B", 45.3, 64.0, 45.2, 77.4, 14.6, 12.2, 25.2, 49.2),
            ("HLAT-7B", "7B", 41.3, 59.5, 38.8, 72.5, 9.4, 7.6, 19.8, 44.6),
            ("OpenLLaMA-1", "13B", 43.5, 62.0, 45.9, 72.3, 8.3, 7.0, 17.0, 47.1),
            ("LLaMA-1", "13B", 46.9, 65.3, 49.7, 78.1, 17.8, 15.8, 22.6, 53.1),
            ("LLaMA-2", "13B", 45.3, 66.3, 50.5, 81.7, 28.7, 18.3, 30.5, 54.6),
            ("LLaMA-1", "33B", 57.8, 68.9, 54.6, 83.1, 35.6, 21.7, 38.4, 59.2),
            ("LLaMA-1", "65B", 63.4, 69.8, 57.0, 85.3, 50.9, 23.7, None, 62.1),
            ("LLaMA-2", "70B", 68.9, 70.7, 59.0, 85.0, 56.8, 30.5, 59.4, 64.7),
            ("HLAT-70B", "70B", 65.1, 67.3, 54.5, 82.6, 48.5, 21.4, 57.9, 60.8),
        ),
    ),
    PaperTable(
        "IV",
        "HLAT-70B: single checkpoints and their average",
        ("mmlu", "cr", "wk", "rc", "math", "pass@1", "average"),
        (
            ("1740B tokens", "70B", 64.5, 67.5, 54.0, 83.1, 47.3, 18.3, 60.3),
            ("1800B tokens", "70B", 64.2, 66.9, 54.0, 82.1, 47.2, 21.8, 60.2),
            ("average of both", "70B", 65.1, 67.3, 54.5, 82.6, 48.5, 21.4, 60.8),
        ),
    ),
    PaperTable(
        "V",
        "Truthfulness (TQA: higher is better) and bias (CSP: lower is better)",
        ("csp_en", "csp_fr", "tqa_mc1", "tqa_mc2"),
        (
            ("OpenLLaMA-1", "7B", 64.6, 50.1, 23.1, 35.1),
            ("OpenLLaMA-2", "7B", 65.6, 51.7, 22.6, 34.6),
            ("LLaMA-1", "7B", 53.7, 47.5, 22.0, 34.1),
            ("LLaMA-2", "7B", 66.9, 54.9, 25.2, 39.0),
            ("HLAT-7B", "7B", 65.2, 54.5, 23.6, 37.2),
            ("LLaMA-1", "65B", 69.3, 58.3, 27.9, 42.6),
            ("LLaMA-2", "70B", 69.8, 63.5, 30.6, 44.8),
            ("HLAT-70B", "70B", 68.1, 59.1, 32.3, 45.9),
        ),
    ),
)


def format_tables(directories: list[Path]) -> list[str]:
    """Return the lines of the tables; raise ConfigError if a run or model has no scores."""
    rows = [row for directory in directories for row in _load_rows(directory)]
    return [line for table in TABLES for line in (*_format_table(table, rows), "")][:-1]


def _load_rows(directory: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted((directory / EVALUATIONS_DIR).glob("*.json")):
        row = load_scores(path)
        name = f"{directory.resolve().name} {_format_model_name(row)}".strip()
        rows.append(row | {"name": name})
    if not rows:
        raise ConfigError(
            f"{directory} has no scores in {EVALUATIONS_DIR}/; give the directory of a run or a "
            f"model, and evaluate it first: hlat evaluate {directory} tasks=hlat_table2"
        )
    return rows


def _format_model_name(row: dict[str, Any]) -> str:
    if row["step"] is None:
        return "" if row["name"] == "scores" else str(row["name"])
    tokens = row.get("tokens")
    return f"step {row['step']}" + ("" if tokens is None else f", {_format_num_tokens(tokens)}")


def _format_num_tokens(tokens: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return str(tokens)


def _format_table(table: PaperTable, rows: list[dict[str, Any]]) -> list[str]:
    rows = [row for row in rows if set(table.columns) & set(row["scores"])]
    titles = "".join(f"{_COLUMN_TITLES.get(key, key):>12}" for key in ("size", *table.columns))
    lines = [
        f"Table {table.number}. {table.caption}, in percent (HLAT paper)",
        f"{'':<{_NAME_WIDTH}}{titles[2:]}",
    ]
    for name, size, *scores in table.rows:
        cells = ["-" if score is None else f"{score:.1f}" for score in scores]
        lines.append(_format_cells(str(name), [str(size), *cells]))
    if rows:
        lines += ["yours:", *(_format_user_row(table, row) for row in rows)]
    if limits := sorted({limit for row in rows for limit in _list_limits(row)}):
        lines.append(f"* some tasks were limited to {', '.join(map(str, limits))} questions each")
    return lines


def _format_user_row(table: PaperTable, row: dict[str, Any]) -> str:
    cells = [""]
    for key in table.columns:
        score, error = row["scores"].get(key), row["stderr"].get(key)
        suffix = ("" if error is None else f" ({error:.1f})") + "*" * bool(_list_limits(row))
        cells.append("-" if score is None else f"{score:.1f}{suffix}")
    return _format_cells(row["name"], cells)


def _list_limits(row: dict[str, Any]) -> list[int]:
    return [task["limit"] for task in row["tasks"].values() if task.get("limit") is not None]


def _format_cells(name: str, cells: list[str]) -> str:
    short = name if len(name) < _NAME_WIDTH else f"{name[: _NAME_WIDTH - 4]}..."
    return f"{short:<{_NAME_WIDTH}}" + "  ".join(f"{cell:>10}" for cell in cells)
