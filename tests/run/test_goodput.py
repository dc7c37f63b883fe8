"""The ledger of a run that is killed twice, beside the clock of the one who killed it."""

import itertools
import os
import signal
import time

import pytest

from hlat.report.run_record import load_run_record
from tests.run.conftest import Runner
from tests.run.test_processes import children

PAUSE = 0.5


def told(runner, file):
    """Whole lines so far; the run may be writing another."""
    return runner.rows("x", file)


def until(process, happened):
    while not happened():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)


@pytest.fixture(scope="module")
def story(tmp_path_factory, small):
    """A run killed at steps 7 and 13: the runner, what a watch beside it said, what it printed."""
    runner = Runner(tmp_path_factory.mktemp("killed"), small)
    watch = {"began": time.time(), "down": [], "at_kill": []}
    for step in (7, 13):
        process = runner.start("run.name=x")
        until(process, lambda s=step: any(r["step"] >= s for r in told(runner, "metrics.jsonl")))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed = time.time()
        watch["at_kill"].append(told(runner, "metrics.jsonl"))
        time.sleep(PAUSE)
        watch["down"].append(time.time() - killed)
    process = runner.start("run.name=x")
    until(process, lambda: told(runner, "events.jsonl")[-1]["event"] == "finish")
    watch["finished"] = time.time()
    printed, problems = process.communicate()
    assert process.returncode == 0, problems
    return runner, watch, printed


def test_the_ledger_closes_and_is_as_long_as_the_watch_says(story):
    runner, watch, _ = story
    found = load_run_record(runner.folder / "runs/x").time_ledger
    assert len(found.attempts) == 3
    assert found.is_fully_accounted, found
    outside = watch["finished"] - watch["began"]
    assert found.wall_seconds == pytest.approx(outside, rel=0.005, abs=0.05)
    for attempt, down in zip(found.attempts, [*watch["down"], 0.0], strict=True):
        assert attempt.seconds["startup"] > 0.5
        # From the last row, which was seen at most a few steps before the kill
        assert down - 0.05 <= attempt.seconds["down"] <= down + 0.5
    assert min(found.seconds.values()) >= 0
    measured = ("preflight", "steps", "evaluation", "checkpoint")
    assert all(found.seconds[kind] > 0 for kind in measured)


def test_what_was_run_again_is_what_had_been_written_and_is_not(story):
    runner, watch, _ = story
    begun = [e for e in told(runner, "events.jsonl") if e["event"] in ("start", "resume")]
    assert "lost_steps" not in begun[0]
    for event, rows in zip(begun[1:], watch["at_kill"], strict=True):
        dropped = [row for row in rows if row["step"] > event["step"]]
        assert event["lost_steps"] == len(dropped) > 0
        assert event["lost_seconds"] >= sum(row["step_seconds"] for row in dropped) - 1e-9
    rows = told(runner, "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 21)]
    assert all(a["attempt"] <= b["attempt"] for a, b in itertools.pairwise(rows))


def test_the_last_lines_and_the_report_tell_of_it(story, hlat):
    runner, _, printed = story
    line = next(line for line in printed.splitlines() if line.startswith("uptime "))
    assert " over 3 attempts; " in line
    done = hlat("report", str(runner.folder / "runs/x"))
    assert done.stdout.splitlines() == [line, str(runner.folder / "runs/x/report.html")]
    page = (runner.folder / "runs/x/report.html").read_text()
    assert "<h2>Wall time</h2>" in page
    assert f"<td>{line.split()[1]} %</td>" in page


def test_the_ledger_of_a_supervised_run_tells_lost_work_from_down_time(runner):
    began = time.time()
    process = runner.start("run.name=x", "recovery.max_restarts=3")
    until(process, lambda: len(runner.rows("x", "metrics.jsonl")) >= 7)
    (worker,) = children(process)
    os.kill(worker, signal.SIGKILL)
    _, problems = process.communicate()
    assert process.returncode == 0, problems
    events = runner.rows("x", "events.jsonl")
    found = load_run_record(runner.folder / "runs/x").time_ledger
    assert found.is_fully_accounted, found
    first, second = found.attempts
    assert first.start_time == pytest.approx(began, abs=0.1)
    (noticed,) = (row["time"] for row in events if row["event"] == "restart")
    assert second.start_time - noticed == pytest.approx(first.seconds["down"])
    assert second.start_time >= noticed
    assert first.seconds["lost"] > 0
