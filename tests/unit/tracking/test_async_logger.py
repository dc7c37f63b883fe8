"""Tests that failing, blocking and slow loggers do not affect the run and cause one warning."""

import logging
import threading
import time
from pathlib import Path

import pytest

from hlat.tracking import async_logger
from hlat.tracking.async_logger import AsyncLogger
from hlat.tracking.metric_logger import MetricLogger, RunInfo

RUN_INFO = RunInfo(Path(), "x", "", 1, 0, 10, {}, None)


class RecordingLogger(MetricLogger):
    """Logger that records its calls and can fail or block in one method."""

    def __init__(self, fails_in="", blocks_in="", abort_fails=False):
        self.calls, self.fails_in, self.blocks_in = [], fails_in, blocks_in
        self.aborted, self.abort_fails = threading.Event(), abort_fails

    def _record(self, method, argument):
        self.calls.append((method, argument))
        if method == self.blocks_in:
            self.aborted.wait()
        if method == self.fails_in:
            raise RuntimeError("it is broken\nin two lines")

    def start(self, run_info):
        self._record("start", run_info)

    def log_metrics(self, row):
        self._record("log_metrics", row)

    def log_event(self, row):
        self._record("log_event", row)

    def rewind(self, step):
        self._record("rewind", step)

    def finish(self, summary):
        self._record("finish", summary)

    def abort(self):
        self._record("abort", None)
        self.aborted.set()
        if self.abort_fails:
            raise RuntimeError("even that")


def start_async(logger):
    wrapper = AsyncLogger("it", logger)
    wrapper.start(RUN_INFO)
    return wrapper


def test_calls_are_forwarded_in_order():
    logger = RecordingLogger()
    wrapper = start_async(logger)
    wrapper.log_metrics({"step": 1})
    wrapper.log_event({"event": "spike"})
    wrapper.rewind(0)
    wrapper.finish({"step": 1})
    wrapper.finish({"step": 1})
    methods = [method for method, _ in logger.calls]
    assert methods == ["start", "log_metrics", "log_event", "rewind", "finish"]


@pytest.mark.parametrize("abort_fails", [False, True])
@pytest.mark.parametrize("method", ["start", "log_metrics", "finish"])
def test_failure_causes_one_warning_and_no_further_calls(method, abort_fails, caplog):
    logger = RecordingLogger(fails_in=method, abort_fails=abort_fails)
    wrapper = start_async(logger)
    for step in range(1, 100):
        wrapper.log_metrics({"step": step})
    wrapper.finish({})
    message = "it is disabled after RuntimeError: it is broken; training continues"
    assert caplog.messages == [message]
    assert [name for name, _ in logger.calls][-2:] == [method, "abort"]


def test_blocking_logger_delays_only_finish(monkeypatch, caplog):
    monkeypatch.setattr(async_logger, "_FINISH_TIMEOUT_S", 0.3)
    monkeypatch.setattr(async_logger, "_MAX_QUEUE_SIZE", 50)
    logger = RecordingLogger(blocks_in="start")
    wrapper = start_async(logger)
    since = time.perf_counter()
    for step in range(1, 1000):
        wrapper.log_metrics({"step": step})
    assert time.perf_counter() - since < 0.25
    wrapper.finish({})
    assert 0.25 < time.perf_counter() - since < 5
    assert caplog.messages == ["it is too slow; some rows are dropped"]
    assert ("abort", None) in logger.calls


@pytest.mark.slow
def test_stall_is_logged_once_until_the_next_row(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(async_logger, "_MIN_STALL_S", 0.1)
    monkeypatch.setattr(async_logger, "_STALL_FACTOR", 0.0)
    logger = RecordingLogger()
    wrapper = start_async(logger)
    time.sleep(0.3)  # start-up and compilation are not stalls
    for step in (1, 2):
        wrapper.log_metrics({"step": step})
        time.sleep(0.35)
    wrapper.finish({})
    stalls = [row for method, row in logger.calls if method == "log_event"]
    assert [(row["event"], row["step"]) for row in stalls] == [("stall", 1), ("stall", 2)]
    assert caplog.messages == []
