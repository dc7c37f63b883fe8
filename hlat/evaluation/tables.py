"""The paper's Tables II, IV and V, with the rows of the user's own models below."""

from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError
from hlat.evaluation.published import SOURCE, TABLES, Line, Table
from hlat.evaluation.results import read
from hlat.evaluation.tasks import AVERAGE, COLUMNS
from hlat.tracking.run_folder import EVALUATIONS

_TITLES = {column.key: column.title for column in COLUMNS} | {AVERAGE: "Avg."}
_NAME = 34


def lines(folders: list[Path]) -> list[str]:
    """The tables, line by line.

    Args:
        folders: Runs or models that were evaluated.

    Raises:
        ConfigError: One of them has no scores.
    """
    rows = [row for folder in folders for row in _rows(folder)]
    return [line for table in TABLES for line in (*_table(table, rows), "")][:-1]


def _rows(folder: Path) -> list[dict[str, Any]]:
    """What is known of each model in a folder, by step and name."""
    found = []
    for path in sorted((folder / EVALUATIONS).glob("*.json")):
        row = read(path)
        found.append(row | {"name": f"{folder.resolve().name} {_called(row)}".strip()})
    if not found:
        hint = "name a run or a model folder, and evaluate it first: python -m hlat.evaluate "
        raise ConfigError(
            f"{folder} has no scores in {EVALUATIONS}/; {hint}{folder} tasks=hlat_table2"
        )
    return found


def _called(row: dict[str, Any]) -> str:
    if row["step"] is None:
        return "" if row["name"] == "scores" else str(row["name"])
    tokens = row.get("tokens")
    return f"step {row['step']}" + ("" if tokens is None else f", {_amount(tokens)}")


def _amount(tokens: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return str(tokens)


def _table(table: Table, rows: list[dict[str, Any]]) -> list[str]:
    own = [row for row in rows if set(table.keys) & set(row["scores"])]
    head = "  ".join(f"{_TITLES.get(key, key):>10}" for key in ("size", *table.keys))
    told = [
        f"Table {table.number}. {table.caption}, in percent ({SOURCE})",
        f"{'':<{_NAME}}{head}",
        *(_paper(table, line) for line in table.lines),
    ]
    if own:
        told += ["yours:", *(_yours(table, row) for row in own)]
    limited = sorted({limit for row in own for limit in _limits(row)})
    if limited:
        told.append(f"* some tasks were limited to {', '.join(map(str, limited))} questions each")
    return told


def _paper(table: Table, line: Line) -> str:
    return _cells(line.name, line.size, [_value(line.values.get(key)) for key in table.keys])


def _yours(table: Table, row: dict[str, Any]) -> str:
    cells = [
        _value(row["scores"].get(key), row["stderr"].get(key), bool(_limits(row)))
        for key in table.keys
    ]
    return _cells(row["name"], "", cells)


def _limits(row: dict[str, Any]) -> list[int]:
    return [task["limit"] for task in row["tasks"].values() if task.get("limit") is not None]


def _cells(name: str, size: str, cells: list[str]) -> str:
    short = name if len(name) < _NAME else f"{name[: _NAME - 4]}..."
    return f"{short:<{_NAME}}" + "  ".join(f"{cell:>10}" for cell in (size, *cells))


def _value(value: float | None, error: float | None = None, limited: bool = False) -> str:
    if value is None:
        return "-"
    spread = "" if error is None else f" ({error:.1f})"
    return f"{value:.1f}{spread}{'*' if limited else ''}"
