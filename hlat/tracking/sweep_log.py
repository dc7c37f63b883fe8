"""The points of a sweep: `sweep.jsonl` in the sweep directory, one row per point.

    number run_folder overrides     a point that was started or submitted, with the planner's
                                    prediction and the job id of a submitted point
    overrides problems              a point that was skipped
    overrides stopped               a point that was not started, since its settings are worse than
                                    their baseline; also in a row of the first kind

A run has no reference to its sweep and may belong to several sweeps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hlat.config.redaction import redact_data
from hlat.config.seeds import is_seed_override
from hlat.tracking.jsonl_log import JsonlLog

SWEEP_POINT_VARIABLE = "HLAT_SWEEP_POINT"
"""Environment variable of the points of a sweep on this machine."""


def is_sweep_dir(directory: Path) -> bool:
    """Return True if `directory` is a sweep directory."""
    return _open_log(directory).path.is_file()


def list_run_dirs(sweep_dir: Path) -> list[Path]:
    """Return the distinct run directories of a sweep, in the order of its points."""
    rows = _open_log(sweep_dir).read_rows()
    return [*dict.fromkeys(Path(row["run_folder"]) for row in rows if "run_folder" in row)]


def list_skipped_points(sweep_dir: Path) -> list[str]:
    """Return a line with overrides and reason for each distinct skipped point of a sweep."""
    skipped = [row for row in _open_log(sweep_dir).read_rows() if "problems" in row]
    lines = (f"[{' '.join(row['overrides'])}] {'; '.join(row['problems'])}" for row in skipped)
    return [*dict.fromkeys(lines)]


def list_stopped_points(sweep_dir: Path) -> list[str]:
    """Return a line with overrides and reason for each point that sequential stopping omitted.

    Points that have been trained since are omitted.
    """
    rows = _open_log(sweep_dir).read_rows()
    reasons = {tuple(row["overrides"]): row["stopped"] for row in rows if "stopped" in row}
    run_dirs = {tuple(row["overrides"]): row["run_folder"] for row in rows if "run_folder" in row}
    return [
        f"[{' '.join(words)}] {reason}"
        for words, reason in reasons.items()
        if words not in run_dirs or not Path(run_dirs[words]).is_dir()
    ]


def count_seeds(sweep_dir: Path) -> int:
    """Return the number of seeds among the overrides of all points."""
    words = {word for row in _open_log(sweep_dir).read_rows() for word in row["overrides"]}
    return sum(map(is_seed_override, words))


def find_run_dir(sweep_dir: Path, overrides: Sequence[str]) -> Path | None:
    """Return the run directory of a point; None if the point is unknown or was skipped."""
    for row in reversed(_open_log(sweep_dir).read_rows()):
        if row["overrides"] == [*overrides] and "run_folder" in row:
            return Path(row["run_folder"])
    return None


def log_point(
    sweep_dir: Path,
    number: int,
    run_dir: Path,
    overrides: Sequence[str],
    details: Mapping[str, Any],
) -> None:
    """Append a point to the log; `details` are further fields of the row."""
    row = {"number": number, "run_folder": str(run_dir.absolute()), "overrides": [*overrides]}
    _append(sweep_dir, {**row, **details})


def log_skipped_point(sweep_dir: Path, overrides: Sequence[str], problems: Sequence[str]) -> None:
    """Append a point that cannot run to the log, with the reasons."""
    _append(sweep_dir, {"overrides": [*overrides], "problems": redact_data([*problems])})


def log_stopped_point(sweep_dir: Path, overrides: Sequence[str], reason: str) -> None:
    """Append a point that sequential stopping omitted to the log, with the reason."""
    _append(sweep_dir, {"overrides": [*overrides], "stopped": redact_data(reason)})


def _append(sweep_dir: Path, row: dict[str, Any]) -> None:
    sweep_dir.mkdir(parents=True, exist_ok=True)
    _open_log(sweep_dir).append(row)


def _open_log(sweep_dir: Path) -> JsonlLog:
    return JsonlLog(sweep_dir / "sweep.jsonl", _is_point)


def _is_point(row: dict[str, Any]) -> bool:
    """Return True for a row of a point; the file may come from others."""
    lists = [row.get("overrides"), row.get("problems", [])]
    is_text = all(
        isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists
    )
    return is_text and all(isinstance(row.get(key, ""), str) for key in ("run_folder", "stopped"))
