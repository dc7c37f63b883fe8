"""Tests of the JSON lines log: partial lines, truncation, full disks."""

import json
import os

import pytest

from hlat.tracking.jsonl_log import JsonlLog


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


def test_non_finite_numbers_are_null(log):
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

    def short(descriptor, data):
        real(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", short)
        log.append({"step": 1})
    assert log.path.read_text() == ""
    log.append({"step": 2})
    assert [row["step"] for row in log.read_rows()] == [1, 2]
