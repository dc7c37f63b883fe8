"""Tests of the JSON lines log: partial lines, truncation, full disks."""

import json
import os
from unittest.mock import Mock

import pytest

from hlat.config.config_errors import ConfigError
from hlat.storage import durable_files
from hlat.tracking import jsonl_log
from hlat.tracking.jsonl_log import JsonlLog, open_events_log, open_metrics_log


@pytest.fixture
def log(tmp_path):
    return JsonlLog(tmp_path / "metrics.jsonl")


def test_read_rows_returns_appended_rows(log):
    log.append({"step": 1, "loss": 0.1})
    log.append({"step": 2, "loss": 0.2})
    assert [row["loss"] for row in log.read_rows()] == [0.1, 0.2]


def test_floats_are_exact(log):
    log.append({"step": 1, "loss": 1 / 3})
    assert log.read_rows()[0]["loss"] == 1 / 3


def test_non_finite_values_are_null(log):
    log.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert json.loads(log.path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }


def test_append_removes_a_partial_line(log):
    log.append({"step": 1})
    with log.path.open("a") as file:
        file.write('{"step": 2, "lo')
    again = JsonlLog(log.path)
    again.append({"step": 2})
    assert again.read_rows() == [{"step": 1}, {"step": 2}]


def test_read_rows_does_not_change_the_file(log):
    text = '{"step": 1}\n{"step": 2, "lo'
    log.path.write_text(text)
    assert JsonlLog(log.path).read_rows() == [{"step": 1}]
    assert log.path.read_text() == text


def test_truncate_after_removes_later_steps(log):
    for step in range(1, 6):
        log.append({"step": step})
    assert log.truncate_after(3) == [{"step": 4}, {"step": 5}]
    assert [row["step"] for row in log.read_rows()] == [1, 2, 3]


def test_full_disk_delays_rows(log, monkeypatch, capsys):
    log.append({"step": 1})
    real = os.write
    with monkeypatch.context() as full:
        full.setattr(
            os,
            "write",
            lambda descriptor, data: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        log.append({"step": 2})
        log.append({"step": 3})
    assert os.write is real
    assert capsys.readouterr().err.count("No space left on device; training continues") == 1
    assert [row["step"] for row in log.read_rows()] == [1]
    log.append({"step": 4})
    assert [row["step"] for row in log.read_rows()] == [1, 2, 3, 4]


def test_full_disk_leaves_no_partial_row(log, monkeypatch):
    real = os.write

    def write_partially(descriptor, data):
        real(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_partially)
        log.append({"step": 1})
    assert log.path.read_text() == ""
    log.append({"step": 2})
    assert [row["step"] for row in log.read_rows()] == [1, 2]


@pytest.mark.parametrize("line", ["[]", "1", "null", '{"step": "1"}', "{}", '{"step": 1}'])
def test_rows_of_other_types_are_damaged(tmp_path, capsys, line):
    for log in (open_metrics_log(tmp_path), open_events_log(tmp_path)):
        row = {"event": "x", "step": 2, "time": 0.5, "attempt": 1, "step_seconds": 0.1}
        log.path.write_text(f"{line}\n{json.dumps(row)}\n")
        assert log.read_rows() == [row]
        assert f"skipping a damaged line of {log.path}" in capsys.readouterr().err


def test_repair_removes_damaged_lines_and_duplicate_steps(log):
    log.path.write_bytes(b'{"step": 1, "a": 1}\n\0\0\0\n{"step": 2}\n{"step": 1, "a": 2}\n')
    assert log.repair() == (1, 1)
    assert log.path.read_text() == '{"step": 2}\n{"step": 1, "a": 2}\n'
    assert log.repair() == (0, 0)


@pytest.fixture
def flushed_names(monkeypatch):
    """Return the names of flushed files and directories."""
    names = []
    for module in (jsonl_log, durable_files):
        monkeypatch.setattr(module, "fsync_file", lambda path: names.append(path.name))
    return names


def test_rows_are_flushed_at_an_interval(log, monkeypatch, flushed_names):
    now = [jsonl_log.time.monotonic()]
    monkeypatch.setattr(jsonl_log.time, "monotonic", lambda: now[0])
    log = JsonlLog(log.path)
    log.append({"step": 1})
    assert flushed_names == []
    now[0] += jsonl_log.SYNC_INTERVAL_S
    log.append({"step": 2})
    log.append({"step": 3})
    assert flushed_names == ["metrics.jsonl"]


def test_a_rewritten_file_is_flushed_before_it_replaces_the_old_one(log, flushed_names):
    for step in (1, 2):
        log.append({"step": step})
    log.truncate_after(1)
    assert flushed_names == [".metrics.jsonl.tmp", log.path.parent.name]


def test_a_disk_that_cannot_flush_does_not_end_training(log, monkeypatch, capsys):
    log.append({"step": 1})
    fail = Mock(side_effect=OSError(5, "Input/output error"))
    monkeypatch.setattr(jsonl_log, "fsync_file", fail)
    log.sync()
    assert "cannot flush" in capsys.readouterr().err


def test_append_does_not_follow_a_symbolic_link(log, tmp_path):
    (tmp_path / "victim").write_text("")
    log.path.symlink_to(tmp_path / "victim")
    log.append({"step": 1})
    assert (tmp_path / "victim").read_text() == ""


def test_read_the_last_row_only(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl")
    assert log.read_last_row() is None
    log.path.write_text("")
    assert log.read_last_row() is None
    for step in range(3):
        log.append({"step": step, "text": "x" * 40_000})
    log.path.write_text(log.path.read_text() + '{"step"')
    assert log.read_last_row()["step"] == 2
    log.path.write_text(log.path.read_text() + "x\n")
    assert log.read_last_row()["step"] == 2, "a damaged line is skipped"
    log.path.write_text('{"step": 7, "text": "' + "x" * 90_000 + '"}\n')
    assert log.read_last_row()["step"] == 7


def test_access_to_a_directory(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be read and written .* move it"):
        open_metrics_log(tmp_path).validate_access()
    open_events_log(tmp_path).validate_access()  # it does not exist


def test_first_append_reads_only_the_last_byte(log, monkeypatch):
    """The log of a sweep is opened for each of its points."""
    log.append({"step": 1})
    reopened = JsonlLog(log.path)
    monkeypatch.setattr(type(log.path), "read_bytes", lambda _: pytest.fail("the file is read"))
    reopened.append({"step": 2})
    monkeypatch.undo()
    assert reopened.read_rows() == [{"step": 1}, {"step": 2}]


def test_append_to_an_empty_file(log):
    log.path.touch()
    log.append({"step": 1})
    assert log.read_rows() == [{"step": 1}]
