"""A listener that fails, hangs or falls behind changes nothing for the run, and is told of once."""

import logging
import threading
import time
from pathlib import Path

import pytest

from hlat.tracking import aside
from hlat.tracking.aside import Aside
from hlat.tracking.listener import Beginning

BEGINNING = Beginning(Path(), "x", "", 1, 0, 10, {}, None)


class Listener:
    """Writes down what it hears; may fail at, or wait in, one of its methods."""

    def __init__(self, fails_at="", waits_in="", fails_to_leave=False):
        self.heard, self.fails_at, self.waits_in = [], fails_at, waits_in
        self.released, self.fails_to_leave = threading.Event(), fails_to_leave

    def _hear(self, method, argument):
        self.heard.append((method, argument))
        if method == self.waits_in:
            self.released.wait()
        if method == self.fails_at:
            raise RuntimeError("it is broken\nin two lines")

    def begin(self, beginning):
        self._hear("begin", beginning)

    def row(self, row):
        self._hear("row", row)

    def event(self, row):
        self._hear("event", row)

    def rewind(self, step):
        self._hear("rewind", step)

    def finish(self, summary):
        self._hear("finish", summary)

    def abandon(self):
        self._hear("abandon", None)
        self.released.set()
        if self.fails_to_leave:
            raise RuntimeError("even that")


def test_everything_is_told_in_order():
    listener = Listener()
    beside = Aside("it", listener)
    beside.begin(BEGINNING)
    beside.row({"step": 1})
    beside.event({"event": "spike"})
    beside.rewind(0)
    beside.finish({"step": 1})
    beside.finish({"step": 1})
    methods = [method for method, _ in listener.heard]
    assert methods == ["begin", "row", "event", "rewind", "finish"]


@pytest.mark.parametrize("fails_to_leave", [False, True])
@pytest.mark.parametrize("method", ["begin", "row", "finish"])
def test_a_failure_is_told_once_and_nothing_after_it(method, fails_to_leave, caplog):
    listener = Listener(fails_at=method, fails_to_leave=fails_to_leave)
    beside = Aside("it", listener)
    beside.begin(BEGINNING)
    for step in range(1, 100):
        beside.row({"step": step})
    beside.finish({})
    sentence = "it is left out from here on: RuntimeError: it is broken; training goes on"
    assert caplog.messages == [sentence]
    assert [name for name, _ in listener.heard][-2:] == [method, "abandon"]


def test_a_listener_that_hangs_delays_nothing_but_the_end_and_that_not_for_long(
    monkeypatch, caplog
):
    monkeypatch.setattr(aside, "_SECONDS_TO_FINISH", 0.3)
    monkeypatch.setattr(aside, "_MAX_WAITING", 50)
    listener = Listener(waits_in="begin")
    beside = Aside("it", listener)
    beside.begin(BEGINNING)
    since = time.perf_counter()
    for step in range(1, 1000):
        beside.row({"step": step})
    assert time.perf_counter() - since < 0.25
    beside.finish({})
    assert 0.25 < time.perf_counter() - since < 5
    assert caplog.messages == ["it has not kept up, and does not hear of all rows from here on"]
    assert ("abandon", None) in listener.heard


def test_silence_is_a_stall_told_once_until_the_next_row(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(aside, "_LEAST_STALL_S", 0.1)
    monkeypatch.setattr(aside, "_STALL_FACTOR", 0.0)
    listener = Listener()
    beside = Aside("it", listener)
    beside.begin(BEGINNING)
    time.sleep(0.3)  # start-up and compilation are no stall
    for step in (1, 2):
        beside.row({"step": step})
        time.sleep(0.35)
    beside.finish({})
    stalls = [row for method, row in listener.heard if method == "event"]
    assert [(row["event"], row["step"]) for row in stalls] == [("stall", 1), ("stall", 2)]
    assert caplog.messages == []
