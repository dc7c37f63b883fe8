"""What a sweep consists of, in its folder: `sweep.jsonl`, one row for each point.

    number run_folder overrides     of a point that was started or sent; also what the planner
                                    expects, and its job if it was sent
    overrides problems              of one that was left out

A run does not know of the sweep that it belongs to, and may belong to several.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hlat.tracking.journal import Journal

_FILE = "sweep.jsonl"


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (folder / _FILE).is_file()


def run_folders(sweep: Path) -> list[Path]:
    """The folders of a sweep's runs, once each, in the order of its points."""
    rows = Journal(sweep / _FILE).rows()
    return [*dict.fromkeys(Path(row["run_folder"]) for row in rows if "run_folder" in row)]


def left_out(sweep: Path) -> list[str]:
    """What a sweep left out, once each: overrides and the reason, in a line."""
    rows = [row for row in Journal(sweep / _FILE).rows() if "problems" in row]
    told = (f"[{' '.join(row['overrides'])}] {'; '.join(row['problems'])}" for row in rows)
    return [*dict.fromkeys(told)]


def run_folder(sweep: Path, overrides: Sequence[str]) -> Path | None:
    """The folder of the run of a point; None if there is no such point, or it was left out."""
    rows = Journal(sweep / _FILE).rows()
    found = [row for row in rows if row["overrides"] == [*overrides] and "run_folder" in row]
    return Path(found[-1]["run_folder"]) if found else None


def add(
    sweep: Path, number: int, run_folder: Path, overrides: Sequence[str], told: Mapping[str, Any]
) -> None:
    """Write down a point.

    Args:
        sweep: Folder of the sweep.
        number: Of the point.
        run_folder: Of its run.
        overrides: What makes it this one.
        told: What else is known of it.
    """
    row = {"number": number, "run_folder": str(run_folder.absolute()), "overrides": [*overrides]}
    _append(sweep, {**row, **told})


def leave_out(sweep: Path, overrides: Sequence[str], problems: Sequence[str]) -> None:
    """Write down a point that cannot run, and why."""
    _append(sweep, {"overrides": [*overrides], "problems": [*problems]})


def _append(sweep: Path, row: dict[str, Any]) -> None:
    sweep.mkdir(parents=True, exist_ok=True)
    Journal(sweep / _FILE).append(row)
