"""Tests of the start time of a process and an attempt."""

import builtins
import subprocess
import sys
import time

import pytest

from hlat.tracking import attempt_start

PRINT_START_TIME = "import time; time.sleep(0.3); from hlat.tracking.attempt_start import get_process_start_time as get; print(repr(get()))"


def test_process_start_time_is_the_time_of_creation():
    before = time.time()
    with subprocess.Popen(
        [sys.executable, "-c", PRINT_START_TIME], stdout=subprocess.PIPE, text=True
    ) as child:
        after = time.time()
        printed = float(child.communicate()[0])
    # The resolution of the kernel is 10 ms
    assert before - 0.02 <= printed <= after + 0.02


def test_process_start_time_without_proc_is_the_import_time(monkeypatch):
    def refuse(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(builtins, "open", refuse)
    assert attempt_start.get_process_start_time() == attempt_start._IMPORT_TIME
    monkeypatch.setattr(attempt_start.sys, "platform", "darwin")
    assert attempt_start.get_process_start_time() == attempt_start._IMPORT_TIME


@pytest.mark.parametrize(
    ("parent_start", "last_record_time", "expected"),
    [
        ("100.5", None, 100.5),
        ("100.5", 50.0, 100.5),
        ("100.5", 200.0, 250.0),
        ("100.5", 250.004, 250.004),
        (None, None, 250.0),
    ],
)
def test_start_time_of_parent_applies_to_first_attempt_only(
    monkeypatch, parent_start, last_record_time, expected
):
    monkeypatch.setattr(attempt_start, "get_process_start_time", lambda: 250.0)
    environment = {} if parent_start is None else {attempt_start.START_TIME_VARIABLE: parent_start}
    assert attempt_start.get_attempt_start_time(last_record_time, environment) == expected
