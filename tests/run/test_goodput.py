"""The time ledger of a run that is killed twice, compared with an external clock."""

import itertools
import time

import pytest

from hlat.study.run_record import load_run_record
from tests.run.conftest import Runner
from tests.run.test_processes import inject

# tests/unit/tracking/test_goodput.py computes the ledger of written events
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("goodput")]

PAUSE = 0.5
KILL_IN_STEP = """
import os
if "CHECKPOINTS" in os.environ:
    import time
    from pathlib import Path
    from hlat.engine.native.native_engine import NativeEngine
    train_step, steps = NativeEngine.train_step, []
    def kill(self, *arguments):
        steps.append(1)
        if len(steps) == 8:
            saved = Path("runs/x/checkpoints").glob
            while len([*saved("step_*/manifest.json")]) < int(os.environ["CHECKPOINTS"]):
                time.sleep(0.02)
            os.kill(os.getpid(), 9)
        return train_step(self, *arguments)
    NativeEngine.train_step = kill
"""
"""Kills an attempt in its eighth step if the number of checkpoints in the variable exists."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory, small):
    """Return the runner of a run killed in steps 8 and 13, the times outside, and its output."""
    runner = Runner(tmp_path_factory.mktemp("killed"), small)
    inject(runner, runner.folder, KILL_IN_STEP)
    outside = {"start": time.time(), "down": [], "at_kill": []}
    for checkpoints in (1, 2):
        runner.environment["CHECKPOINTS"] = str(checkpoints)
        process = runner.run_process("run.name=x")
        ended = time.time()
        assert process.returncode == -9, process.stderr
        rows = runner.rows("x", "metrics.jsonl")
        outside["at_kill"].append(rows)
        time.sleep(PAUSE)
        now = time.time()
        outside["down"].append((now - ended, now - rows[-1]["time"]))
    del runner.environment["CHECKPOINTS"]
    process = runner.start("run.name=x")
    while not any(row["event"] == "finish" for row in runner.rows("x", "events.jsonl")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    outside["finish"] = time.time()
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    return runner, outside, printed


def test_account_for_the_wall_time_measured_outside(killed):
    runner, outside, _ = killed
    found = load_run_record(runner.folder / "runs/x").time_ledger
    assert len(found.attempts) == 3
    unaccounted = sum(abs(attempt.unaccounted_seconds) for attempt in found.attempts)
    assert unaccounted < 0.03 * found.wall_seconds, found
    assert found.wall_seconds == pytest.approx(outside["finish"] - outside["start"], abs=1)
    for attempt, (least, most) in zip(found.attempts, outside["down"], strict=False):
        assert attempt.seconds["startup"] > 0.5
        # The kill follows the last row; the next process starts after the pause
        assert least - 0.05 <= attempt.seconds["down"] <= most + 1
    assert found.attempts[-1].seconds["down"] == 0
    assert min(found.seconds.values()) >= 0
    measured = ("preflight", "steps", "evaluation", "checkpoint")
    assert all(found.seconds[kind] > 0 for kind in measured)


def test_log_the_steps_that_were_lost(killed):
    runner, outside, _ = killed
    starts = [e for e in runner.rows("x", "events.jsonl") if e["event"] in ("start", "resume")]
    assert "lost_steps" not in starts[0]
    for event, rows in zip(starts[1:], outside["at_kill"], strict=True):
        dropped = [row for row in rows if row["step"] > event["step"]]
        assert event["lost_steps"] == len(dropped) > 0
        assert event["lost_seconds"] >= sum(row["step_seconds"] for row in dropped) - 1e-9
    rows = runner.rows("x", "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 21)]
    assert all(a["attempt"] <= b["attempt"] for a, b in itertools.pairwise(rows))


def test_print_and_report_the_uptime(killed, hlat):
    runner, _, printed = killed
    line = next(line for line in printed.splitlines() if line.startswith("uptime "))
    assert " over 3 attempts; " in line
    done = hlat("report", str(runner.folder / "runs/x"))
    assert done.stdout.splitlines() == [line, str(runner.folder / "runs/x/report.html")]
    page = (runner.folder / "runs/x/report.html").read_text()
    assert "<h2>Wall time</h2>" in page
    assert f"<dd>{line.split()[1]} %</dd>" in page
