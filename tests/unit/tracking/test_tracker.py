"""Tests of the Tracker: rows, attempts and times."""

import json
import logging
import os
import shutil
import time

import pytest
from omegaconf import OmegaConf

from hlat.tracking import attempt_start, run_directory, tracking_services
from hlat.tracking import tracker as tracker_module
from hlat.tracking.tracker import Tracker

NUMBERS = {"learning_rate": 0.1, "loss": 2.0, "grad_norm": 1.0, "param_norm": 3.0}


@pytest.fixture
def clock(monkeypatch):
    """Clock that is advanced explicitly."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(tracker_module.time, "perf_counter", lambda: Clock.now)
    return Clock


@pytest.fixture
def open_tracker(compose, tmp_path):
    config = OmegaConf.to_object(compose("hardware=trn1_32xl"))
    return lambda: Tracker(tmp_path, config)


def _rows(tmp_path, name):
    return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


def test_times_are_means_over_the_steps_since_the_last_row(open_tracker, clock, tmp_path):
    tracker = open_tracker()
    tracker.start_attempt(0)
    for _ in range(5):
        tracker.add_data_wait(0.1)
    clock.now += 10.0
    tracker.log_metrics(5, "base", **NUMBERS)
    (row,) = _rows(tmp_path, "metrics.jsonl")
    assert row["step_seconds"] == 2.0
    assert row["tokens_per_second"] == 8 * 256 / 2.0
    assert row["data_wait_seconds"] == pytest.approx(0.1)
    assert row["tokens"] == 5 * 8 * 256


def test_restart_clock_excludes_evaluations_and_saves(open_tracker, clock, tmp_path):
    tracker = open_tracker()
    tracker.start_attempt(0)
    clock.now += 1000.0
    tracker.restart_clock(0)
    clock.now += 1.0
    tracker.log_metrics(1, "base", **NUMBERS)
    assert _rows(tmp_path, "metrics.jsonl")[0]["step_seconds"] == 1.0


def test_mfu_is_null_without_a_peak_for_the_compute_dtype(open_tracker, clock, tmp_path):
    tracker = open_tracker()
    tracker.start_attempt(0)
    clock.now += 1.0
    tracker.log_metrics(1, "base", **NUMBERS)
    # trn1 has a cited peak for bf16 only, and the default recipe computes in fp32
    assert _rows(tmp_path, "metrics.jsonl")[0]["mfu"] is None


def test_start_attempt_removes_rows_after_its_step(open_tracker, clock, tmp_path):
    first = open_tracker()
    first.start_attempt(0)
    for step in (1, 2, 3):
        clock.now += 1.0
        first.log_metrics(step, "base", **NUMBERS)
    second = open_tracker()
    second.start_attempt(2)
    clock.now += 1.0
    second.log_metrics(3, "base", **NUMBERS)
    rows = _rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["attempt"] for row in rows] == [1, 1, 2]
    assert [row["event"] for row in _rows(tmp_path, "events.jsonl")] == ["start", "resume"]


def test_exclude_time_excludes_time_from_step_seconds(open_tracker, clock, tmp_path):
    tracker = open_tracker()
    tracker.start_attempt(0)
    clock.now += 3.0
    since = clock.now
    clock.now += 100.0
    assert tracker.exclude_time(since) == 100.0
    clock.now += 1.0
    tracker.log_metrics(4, "base", **NUMBERS)
    assert _rows(tmp_path, "metrics.jsonl")[0]["step_seconds"] == 1.0


def test_time_of_writing_a_row_belongs_to_the_next_row(open_tracker, clock, tmp_path, monkeypatch):
    tracker = open_tracker()
    tracker.start_attempt(0)
    append = tracker._metrics_log.append

    def append_slowly(row):
        clock.now += 0.25
        append(row)

    monkeypatch.setattr(tracker._metrics_log, "append", append_slowly)
    for step in (1, 2):
        clock.now += 1.0
        tracker.log_metrics(step, "base", **NUMBERS)
    assert [row["step_seconds"] for row in _rows(tmp_path, "metrics.jsonl")] == [1.0, 1.25]


def test_resume_event_contains_start_time_and_lost_work(open_tracker, clock, tmp_path):
    first = open_tracker()
    first.start_attempt(0)
    clock.now += 50.0
    first.log_ready(0)
    for step in (2, 3, 5):
        clock.now += 1.0
        first.log_metrics(step, "base", **NUMBERS)
    first.log_event("evaluate", 5, seconds=4.0)
    until = _rows(tmp_path, "metrics.jsonl")[-1]["time"]
    open_tracker().start_attempt(2)
    start, ready, _, resume = _rows(tmp_path, "events.jsonl")
    assert "lost_steps" not in start
    assert start["began"] <= start["time"] <= ready["time"]
    assert resume["lost_steps"] == 3
    assert resume["lost_seconds"] == 6.0
    entry = {"seconds": 6.0, "until": until, "last_step": 5}
    assert resume["lost_by_attempt"] == {"1": entry}
    assert _rows(tmp_path, "metrics.jsonl")[0]["step_seconds"] == 0.5


def test_rewind_event_contains_lost_work(open_tracker, clock, tmp_path):
    tracker = open_tracker()
    tracker.start_attempt(0)
    for step in (2, 4, 6):
        clock.now += 2.0
        tracker.log_metrics(step, "base", **NUMBERS)
    clock.now += 3.0
    tracker.rewind(4)
    clock.now += 1.0
    tracker.log_metrics(5, "base", **NUMBERS)
    rewind = _rows(tmp_path, "events.jsonl")[-1]
    assert (rewind["event"], rewind["step"], rewind["seconds"]) == ("rewind", 4, 3.0)
    assert (rewind["lost_steps"], rewind["lost_seconds"]) == (2, 2.0)
    assert [row["step"] for row in _rows(tmp_path, "metrics.jsonl")] == [2, 4, 5]


def test_start_time_of_parent_applies_to_first_attempt_only(open_tracker, tmp_path, monkeypatch):
    parent = time.time() - 5
    monkeypatch.setenv(attempt_start.START_TIME_VARIABLE, str(parent))
    process_start = time.time() + 5
    monkeypatch.setattr(attempt_start, "get_process_start_time", lambda: process_start)
    failed_at_startup = open_tracker()
    failed_at_startup.log_event("restart", 0)
    first = open_tracker()
    first.start_attempt(0)
    open_tracker().start_attempt(0)
    starts = [row for row in _rows(tmp_path, "events.jsonl") if row["event"] == "start"]
    assert [row["began"] for row in starts] == [parent, process_start]


def test_cost_counts_all_nodes_over_all_attempts(open_tracker, clock, tmp_path, monkeypatch):
    """trn1.32xlarge at 21.50 USD per hour: 100 seconds of an attempt, then 20 of another."""
    now = time.time() + 1e6
    wall = [now]
    monkeypatch.setattr(tracker_module.time, "time", lambda: wall[0])
    monkeypatch.setattr(tracker_module, "get_attempt_start_time", lambda _: wall[0])
    for seconds in (100.0, 20.0):
        tracker = open_tracker()
        tracker.start_attempt(0)
        wall[0] += seconds
        clock.now += seconds
        tracker.log_metrics(1, "base", **NUMBERS)
        wall[0] += 5000.0
    (row,) = _rows(tmp_path, "metrics.jsonl")
    assert row["cost_usd"] == pytest.approx(21.50 * 120 / 3600, rel=1e-6)
    assert row["cpt_usd"] == pytest.approx(row["cost_usd"] / row["tokens"] * 4e6)


def test_console_displays_warnings_of_finishing_services(open_tracker, monkeypatch, capsys):
    class LateLogger:
        """Logger that warns in `finish`."""

        start = log_metrics = log_event = rewind = abort = staticmethod(lambda argument=None: None)

        def finish(self, summary):
            logging.getLogger("hlat").warning("it is broken")

    monkeypatch.setattr(
        tracking_services,
        "build_metric_loggers",
        lambda config, print_message: {"late": LateLogger()},
    )
    monkeypatch.setattr(logging.getLogger("hlat"), "handlers", [])
    tracker = open_tracker()
    tracker.start_attempt(0)
    tracker.close()
    assert capsys.readouterr().out == "WARNING: it is broken\n"


def test_rows_contain_neuron_monitor_metrics(open_tracker, tmp_path, monkeypatch):
    program = tmp_path / "neuron-monitor"
    counters = {"neuroncores_in_use": {"0": {"neuroncore_utilization": 42.5}}}
    report = {"neuron_runtime_data": [{"report": {"neuroncore_counters": counters}}]}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(report)}'\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tracker = open_tracker()
    tracker.start_attempt(0)
    step, row = 0, {}
    while "neuroncore_utilization" not in row:
        step += 1
        assert step < 1000
        time.sleep(0.01)
        tracker.log_metrics(step, "base", **NUMBERS)
        row = _rows(tmp_path, "metrics.jsonl")[-1]
    tracker.close()
    assert row["neuroncore_utilization"] == 42.5


def test_external_scores_are_forwarded_to_services(open_tracker, clock, tmp_path, monkeypatch):
    logged = []

    class Service:
        def start(self, run_info):
            pass

        def log_event(self, row):
            logged.append((row["event"], row["step"]))

        def log_metrics(self, row):
            pass

        def finish(self, summary):
            pass

    monkeypatch.setattr(
        tracking_services, "build_metric_loggers", lambda config, print_message: {"it": Service()}
    )
    score = {"event": "score", "step": 1, "time": 1e12, "tokens": 9, "scores": {"cr": 50.0}}

    def append():
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write(json.dumps(score) + "\n")

    first = open_tracker()
    first.start_attempt(0)
    append()
    row = {"step": 2, "attempt": 1, "time": time.time()}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    first.log_event("checkpoint", 2)
    first.log_event("finish", 3)
    append()
    assert logged == [("start", 0), ("checkpoint", 2), ("score", 1), ("finish", 3)]
    logged.clear()
    second = open_tracker()
    second.start_attempt(2)
    assert logged == [("score", 1), ("resume", 2)]
    began = _rows(tmp_path, "events.jsonl")[-1]["began"]
    assert began < time.time()


def test_a_resume_reports_rows_that_are_missing_before_the_checkpoint(
    open_tracker, tmp_path, capsys
):
    first = open_tracker()
    first.start_attempt(0)
    for step in range(1, 6):
        first.log_metrics(step, "pretrain", **NUMBERS)
    first.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]) + "\0\n" + lines[1])
    second = open_tracker()
    second.start_attempt(5)
    lost = {"damaged": 1, "duplicate": 1, "first_missing": 3, "last_missing": 5}
    (event,) = second.get_events("lost_rows")
    assert lost.items() <= event.items()
    assert "damaged 1, duplicate 1, first_missing 3, last_missing 5" in capsys.readouterr().out
    assert [row["step"] for row in second.get_recent_rows(9)] == [1, 2]
    second.close()


def test_a_resume_with_all_rows_reports_nothing(open_tracker):
    for first_step in (0, 3):
        tracker = open_tracker()
        tracker.start_attempt(first_step)
        for step in range(first_step + 1, first_step + 4):
            tracker.log_metrics(step, "pretrain", **NUMBERS)
        assert tracker.get_events("lost_rows") == []
        tracker.close()


def test_a_removed_run_directory_is_reported_and_its_metadata_written_again(
    open_tracker, tmp_path, capsys
):
    with run_directory.lock_run_dir(tmp_path):
        tracker = open_tracker()
        tracker.start_attempt(0)
        tracker.write_metadata(["a=1"], {"host": "x"})
        tracker.log_metrics(1, "pretrain", **NUMBERS)
        assert tracker.get_events("run_directory_removed") == []
        shutil.rmtree(tmp_path)
        tracker.log_metrics(2, "pretrain", **NUMBERS)
        tracker.log_metrics(3, "pretrain", **NUMBERS)
        assert (tmp_path / "overrides.yaml").read_text() == '- "a=1"\n'
        assert json.loads((tmp_path / "provenance.json").read_text()) == {"host": "x"}
        assert [row["step"] for row in tracker.get_recent_rows(9)] == [2, 3]
        assert [row["step"] for row in tracker.get_events("run_directory_removed")] == [2]
        assert f"{tmp_path} was removed during the run" in capsys.readouterr().out
        with pytest.raises(BlockingIOError):
            run_directory.lock_run_dir(tmp_path)
        tracker.close()
        run_directory.lock_run_dir(tmp_path).close()
