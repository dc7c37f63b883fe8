"""When a process began, beside the clock of the one that started it."""

import builtins
import subprocess
import sys
import time

import pytest

from hlat.tracking import beginning

ASK = "import time; time.sleep(0.3); from hlat.tracking.beginning import process_began; print(repr(process_began()))"


def test_the_process_began_when_it_was_started_not_when_it_asked():
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", ASK], stdout=subprocess.PIPE, text=True) as child:
        after = time.time()
        told = float(child.communicate()[0])
    # The kernel counts in hundredths of a second
    assert before - 0.02 <= told <= after + 0.02


def test_where_there_is_no_proc_it_began_when_it_was_imported(monkeypatch):
    def refuse(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(builtins, "open", refuse)
    assert beginning.process_began() == beginning._IMPORTED
    monkeypatch.setattr(beginning.sys, "platform", "darwin")
    assert beginning.process_began() == beginning._IMPORTED


@pytest.mark.parametrize(
    ("told", "record_ends", "expected"),
    [
        ("100.5", None, 100.5),
        ("100.5", 50.0, 100.5),
        ("100.5", 200.0, 250.0),
        ("100.5", 250.004, 250.004),
        (None, None, 250.0),
    ],
)
def test_who_started_the_process_stands_for_its_first_attempt_alone(
    monkeypatch, told, record_ends, expected
):
    monkeypatch.setattr(beginning, "process_began", lambda: 250.0)
    environment = {} if told is None else {beginning.VARIABLE: told}
    assert beginning.attempt_began(record_ends, environment) == expected
