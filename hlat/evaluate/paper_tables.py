"""Tables II, IV and V of the HLAT paper with the scores of the user's models."""

from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.evaluate.evaluation_results import load_scores
from hlat.evaluate.paper_tasks import AVERAGE, COLUMNS
from hlat.evaluate.published_scores import SOURCE, TABLES, PaperTable
from hlat.tracking.run_directory import EVALUATIONS_DIR

_COLUMN_TITLES = {column.key: column.title for column in COLUMNS} | {AVERAGE: "Avg."}
_NAME_WIDTH = 34


def format_tables(directories: list[Path]) -> list[str]:
    """Return the lines of the tables.

    Args:
        directories: Runs or models with scores.

    Raises:
        ConfigError: A directory contains no scores.
    """
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
            f"model, and evaluate it first: python -m hlat.evaluate {directory} tasks=hlat_table2"
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
        f"Table {table.number}. {table.caption}, in percent ({SOURCE})",
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
