"""A log survives half a line, a rewind and a full disk."""

import json
import os

import pytest

from hlat.tracking.journal import Journal


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "metrics.jsonl")


def test_rows_come_back(journal):
    journal.append({"step": 1, "loss": 0.1})
    journal.append({"step": 2, "loss": 0.2})
    assert [row["loss"] for row in journal.rows()] == [0.1, 0.2]


def test_floats_come_back_to_the_last_bit(journal):
    journal.append({"step": 1, "loss": 1 / 3})
    assert journal.rows()[0]["loss"] == 1 / 3


def test_not_a_number_is_null_so_that_any_json_reader_can_read_it(journal):
    journal.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert json.loads(journal.path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }


def test_half_a_line_of_a_killed_process_is_cut_off(journal):
    journal.append({"step": 1})
    with journal.path.open("a") as file:
        file.write('{"step": 2, "lo')
    again = Journal(journal.path)
    again.append({"step": 2})
    assert again.rows() == [{"step": 1}, {"step": 2}]


def test_who_only_reads_changes_nothing(journal):
    text = '{"step": 1}\n{"step": 2, "lo'
    journal.path.write_text(text)
    assert Journal(journal.path).rows() == [{"step": 1}]
    assert journal.path.read_text() == text


def test_rewinding_drops_later_steps_only(journal):
    for step in range(1, 6):
        journal.append({"step": step})
    assert journal.keep(3) == [{"step": 4}, {"step": 5}]
    assert [row["step"] for row in journal.rows()] == [1, 2, 3]


def test_a_full_disk_delays_rows_and_loses_none(journal, monkeypatch, capsys):
    journal.append({"step": 1})
    real = os.write
    with monkeypatch.context() as full:
        full.setattr(
            os,
            "write",
            lambda descriptor, data: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        journal.append({"step": 2})
        journal.append({"step": 3})
    assert os.write is real
    assert capsys.readouterr().err.count("No space left on device; training goes on") == 1
    assert [row["step"] for row in journal.rows()] == [1]
    journal.append({"step": 4})
    assert [row["step"] for row in journal.rows()] == [1, 2, 3, 4]


def test_a_disk_that_fills_in_the_middle_of_a_row_leaves_no_half_row(journal, monkeypatch):
    real = os.write

    def short(descriptor, data):
        real(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", short)
        journal.append({"step": 1})
    assert journal.path.read_text() == ""
    journal.append({"step": 2})
    assert [row["step"] for row in journal.rows()] == [1, 2]
