"""The points of a sweep."""

from pathlib import Path

import pytest

from hlat.tracking import sweep_log
from hlat.tracking.jsonl_log import JsonlLog


def test_stopped_points_are_those_without_a_run_and_are_found_in_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trained").mkdir()
    for number, name in enumerate(["removed", "trained", "removed"]):
        words = [f"run.seed={number}"]
        sweep_log.log_stopped_point(tmp_path, words, f"reason {number}")
        sweep_log.log_point(tmp_path, number, tmp_path / name, words, {})
    sweep_log.log_stopped_point(tmp_path, ["run.seed=3"], "reason 3")
    reads = []
    read_rows = JsonlLog.read_rows
    monkeypatch.setattr(JsonlLog, "read_rows", lambda log: reads.append(log) or read_rows(log))
    assert sweep_log.list_stopped_points(tmp_path) == [
        "[run.seed=0] reason 0",
        "[run.seed=2] reason 2",
        "[run.seed=3] reason 3",
    ]
    assert len(reads) == 1


def test_last_run_directory_of_a_point_is_used(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    sweep_log.log_stopped_point(tmp_path, ["a=1"], "worse")
    sweep_log.log_point(tmp_path, 0, tmp_path / "first", ["a=1"], {})
    sweep_log.log_point(tmp_path, 0, tmp_path / "second", ["a=1"], {})
    assert sweep_log.list_stopped_points(tmp_path) == []
    assert sweep_log.find_run_dir(tmp_path, ["a=1"]) == tmp_path / "second"
