"""Time ledger of a run, from synthetic rows: each time category, and overlaps."""

import math

import numpy as np
import pytest

from hlat.tracking import lost_work
from hlat.tracking.goodput import METRIC_COLUMNS, TIME_CATEGORIES, build_time_ledger

START = 1_763_654_400.0


class SyntheticRun:
    """Synthetic run that records the rows of a tracker."""

    def __init__(self):
        self.now = START
        self.metrics, self.events = [], []
        self.attempt, self.step = 0, 0

    def pass_time(self, seconds):
        self.now += seconds
        return self

    def event(self, event, step=None, **details):
        row = {"event": event, "step": self.step if step is None else step}
        self.events.append(row | {"attempt": self.attempt, "time": self.now} | details)
        return self

    def begin(self, step, startup):
        """Start a process that restores `step` and is ready after `startup` seconds."""
        self.attempt, self.step = self.attempt + 1, step
        dropped = [row for row in self.metrics if row["step"] > step]
        lost = lost_work.compute_lost_work(dropped, self.events, step) if self.events else {}
        self.metrics = [row for row in self.metrics if row["step"] <= step]
        began = self.now
        self.pass_time(startup - 1)
        self.event("resume" if step else "start", began=began, **lost)
        return self.pass_time(1).event("ready")

    def row(self, steps, seconds, wait=0.0):
        """Add a row of `steps` steps of `seconds` each, of which `wait` waited for data."""
        self.step += steps
        self.pass_time(steps * seconds)
        row = {"step": self.step, "step_seconds": seconds, "data_wait_seconds": wait}
        self.metrics.append(row | {"attempt": self.attempt, "time": self.now})
        return self

    def rewind(self, step, seconds):
        """Rewind to a step within the attempt, in `seconds`."""
        dropped = [row for row in self.metrics if row["step"] > step]
        self.metrics = [row for row in self.metrics if row["step"] <= step]
        self.pass_time(seconds)
        lost = lost_work.compute_lost_work(dropped, self.events, step)
        self.event("rewind", step, seconds=seconds, **lost)
        self.step = step
        return self

    def evaluate(self, seconds):
        return self.pass_time(seconds).event("evaluate", seconds=seconds)

    def save(self, seconds):
        return self.pass_time(seconds).event("checkpoint", stall_seconds=seconds, seconds=9.0)

    def ledger(self):
        columns = {
            key: np.array([row.get(key, math.nan) for row in self.metrics], dtype=np.float64)
            for key in METRIC_COLUMNS
        }
        return build_time_ledger(columns, self.events)


def nonzero_seconds(entry):
    """Return the categories with time."""
    return {kind: pytest.approx(seconds) for kind, seconds in entry.seconds.items() if seconds}


def test_every_time_category_of_one_attempt():
    run = SyntheticRun()
    run.attempt = 1
    run.pass_time(4).event("preflight", seconds=3.0)
    run.attempt = 0
    run.now = START
    run.begin(0, startup=10).evaluate(2)
    run.row(1, 31.0, wait=1.0).row(1, 2.0, wait=0.5).row(10, 1.5).row(10, 1.5)
    run.save(3).event("checkpoint_failed", stall_seconds=0.0).event("finish")
    found = run.ledger()
    assert nonzero_seconds(found) == {
        "startup": 7.0, "preflight": 3.0, "evaluation": 2.0, "checkpoint": 3.0,
        "compile": 28.5, "data_wait": 1.5, "steps": 1.5 + 1.5 + 30,
    }  # fmt: skip
    assert found.wall_seconds == pytest.approx(10 + 2 + 31 + 2 + 30 + 3)
    assert found.unaccounted_seconds == pytest.approx(0)
    assert found.goodput == pytest.approx(33 / 78)
    assert found.uptime == 1
    assert found.is_fully_accounted


@pytest.mark.parametrize(
    ("end", "down"),
    [
        ({"event": "finish"}, 0),
        ({"event": "interrupt", "signal": "SIGINT"}, 0),
        ({"event": "interrupt", "signal": "SIGTERM"}, 900),
        ({"event": "diverge"}, 900),
    ],
)
def test_a_run_that_its_user_stopped_is_not_down(end, down):
    run = SyntheticRun().begin(0, startup=1).row(10, 1.0).event(**end)
    found = run.pass_time(900).begin(10, startup=1).row(10, 1.0).event("finish").ledger()
    assert found.seconds["down"] == down
    assert found.wall_seconds == pytest.approx(22 + down)
    assert found.is_fully_accounted


def test_a_row_of_many_steps_counts_the_compilation_once():
    run = SyntheticRun().begin(0, startup=1).row(100, 1.3).row(100, 1.0).row(100, 1.0)
    assert nonzero_seconds(run.ledger()) == {"startup": 1, "compile": 30.0, "steps": 300.0}


def test_a_first_row_that_is_no_slower_has_compiled_nothing():
    run = SyntheticRun().begin(0, startup=1).row(10, 0.9).row(10, 1.0)
    assert nonzero_seconds(run.ledger()) == {"startup": 1, "steps": 19.0}


def test_compilation_of_an_attempt_of_one_row_is_estimated_from_other_attempts():
    run = SyntheticRun().begin(0, startup=1).row(1, 11.0).row(1, 1.0).save(1).event("interrupt")
    run.begin(2, startup=1).row(1, 8.0).save(1).event("finish")
    assert [one.seconds["compile"] for one in run.ledger().attempts] == [10, 7]
    assert SyntheticRun().begin(0, startup=1).row(1, 8.0).ledger().seconds["compile"] == 0


def test_repeated_steps_are_lost_with_their_evaluations_and_saves():
    run = SyntheticRun().begin(0, startup=5).evaluate(2).row(5, 1.0).save(1)
    run.row(5, 1.0, wait=0.5).evaluate(4).event("checkpoint_failed", stall_seconds=3.0)
    run.pass_time(3).row(2, 1.0)
    killed = run.now
    run.pass_time(100).begin(5, startup=5)
    beginning = run.events[-2]
    assert beginning["lost_steps"] == 7
    assert beginning["lost_seconds"] == 5 + 4 + 3 + 2
    assert beginning["lost_by_attempt"] == {
        "1": {"seconds": 14.0, "until": killed, "last_step": 12}
    }
    run.row(5, 1.0).evaluate(4).save(3).event("finish")
    first, second = run.ledger().attempts
    assert nonzero_seconds(first) == {
        "startup": 5, "evaluation": 2, "steps": 5, "checkpoint": 1, "lost": 14, "down": 100,
    }  # fmt: skip
    assert nonzero_seconds(second) == {"startup": 5, "steps": 5, "evaluation": 4, "checkpoint": 3}
    assert (first.unaccounted_seconds, second.unaccounted_seconds) == (
        pytest.approx(0),
        pytest.approx(0),
    )
    assert run.ledger().uptime == pytest.approx(1 - 100 / run.ledger().wall_seconds)


def test_time_from_the_last_row_to_the_restart_event_is_lost():
    run = SyntheticRun().begin(0, startup=5).evaluate(2).row(5, 1.0).save(1)
    run.pass_time(30).event("restart", reason="rank 3 was killed by SIGKILL")
    run.pass_time(7).begin(5, startup=5).row(5, 1.0).event("finish")
    first, second = run.ledger().attempts
    assert nonzero_seconds(first) == {
        "startup": 5, "evaluation": 2, "steps": 5, "checkpoint": 1, "lost": 30, "down": 7,
    }  # fmt: skip
    assert nonzero_seconds(second) == {"startup": 5, "steps": 5}
    assert run.ledger().is_fully_accounted


def test_a_restart_event_without_an_attempt_belongs_to_the_last_one():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0)
    run.pass_time(30).event("restart")
    del run.events[-1]["attempt"]
    run.pass_time(7).begin(0, startup=5)
    assert nonzero_seconds(run.ledger().attempts[0]) == {"startup": 5, "lost": 35, "down": 7}


def test_a_start_up_that_fails_twice_is_down_time():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).save(1)
    run.pass_time(2).event("restart").pass_time(60).event("restart").pass_time(8)
    run.begin(5, startup=5).row(1, 1.0)
    assert nonzero_seconds(run.ledger().attempts[0]) == {
        "startup": 5, "steps": 5, "checkpoint": 1, "lost": 2, "down": 68,
    }  # fmt: skip


def test_time_to_the_last_event_after_the_last_row_is_lost():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).save(1).pass_time(20).event("stalled")
    run.pass_time(4).event("restart").pass_time(1).begin(5, startup=5).row(1, 1.0)
    assert run.ledger().attempts[0].seconds["lost"] == pytest.approx(24)
    assert run.ledger().is_fully_accounted


def test_an_attempt_that_fails_before_its_first_row():
    run = SyntheticRun().begin(0, startup=5).evaluate(3).pass_time(50).event("restart")
    run.pass_time(2).begin(0, startup=5).row(1, 1.0)
    assert nonzero_seconds(run.ledger().attempts[0]) == {
        "startup": 5, "evaluation": 3, "lost": 50, "down": 2,
    }  # fmt: skip


def test_failed_preflight_checks_are_no_attempt():
    run = SyntheticRun()
    run.attempt = 1
    run.pass_time(4).event("preflight", seconds=3.0)
    assert nonzero_seconds(run.ledger()) == {}
    run.pass_time(60)
    run.attempt = 0
    assert nonzero_seconds(run.begin(0, startup=5).ledger()) == {"startup": 5}


def test_an_interruption_loses_nothing():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).save(1).event("interrupt")
    run.pass_time(9).event("restart").pass_time(11).begin(5, startup=5).row(1, 1.0)
    run.event("finish")
    found = run.ledger().attempts[0]
    assert nonzero_seconds(found) == {"startup": 5, "steps": 5, "checkpoint": 1, "down": 20}


def test_a_restart_before_several_attempts_loses_time_of_each():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).save(1).row(5, 2.0).save(1)
    run.pass_time(10).begin(10, startup=5).row(3, 1.0).evaluate(2)
    run.pass_time(20).begin(5, startup=5).row(8, 1.0).save(1).event("finish")
    one, two, three = run.ledger().attempts
    assert nonzero_seconds(one) == {
        "startup": 5,
        "steps": 5,
        "checkpoint": 1,
        "lost": 11,
        "down": 10,
    }
    assert nonzero_seconds(two) == {"startup": 5, "lost": 5, "down": 20}
    assert nonzero_seconds(three) == {"startup": 5, "steps": 8, "checkpoint": 1}
    assert all(one.unaccounted_seconds == pytest.approx(0) for one in run.ledger().attempts)


def test_lost_time_is_counted_once():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).save(1)
    for _ in range(3):
        run.row(4, 1.0).evaluate(2).pass_time(10).begin(5, startup=5)
    run.row(4, 1.0).evaluate(2).save(1).event("finish")
    assert [one.seconds["lost"] for one in run.ledger().attempts] == [6, 6, 6, 0]
    assert run.ledger().seconds["evaluation"] == 2
    assert run.ledger().is_fully_accounted


def test_a_rewind_loses_its_steps_and_its_time():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).save(1).row(3, 1.0).evaluate(2).row(3, 1.0)
    run.rewind(5, 4.0).row(6, 1.0).evaluate(2)
    expected = {"startup": 5, "steps": 11, "checkpoint": 1, "evaluation": 2, "lost": 12}
    assert nonzero_seconds(run.ledger()) == expected
    assert run.ledger().unaccounted_seconds == pytest.approx(0)
    run.pass_time(10).event("restart").begin(5, startup=5)
    lost = 12 + 6 + 2 + 10
    assert run.ledger().attempts[0].seconds["lost"] == pytest.approx(lost)
    assert run.ledger().is_fully_accounted


def test_time_after_the_last_row_is_lost_when_a_run_gives_up():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).pass_time(7).event("give_up")
    assert nonzero_seconds(run.ledger()) == {"startup": 5, "steps": 5, "lost": 7}


def test_a_branch_starts_at_the_step_of_its_trunk():
    run = SyntheticRun().begin(15, startup=5).row(5, 2.0).row(5, 2.0).event("finish")
    assert nonzero_seconds(run.ledger()) == {"startup": 5, "steps": 20}


def test_unmeasured_time_is_unaccounted():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).pass_time(3).row(5, 1.0).event("finish")
    found = run.ledger()
    assert found.unaccounted_seconds == pytest.approx(3)
    assert found.attempts[0].unaccounted_seconds == pytest.approx(3)
    assert not found.is_fully_accounted


def test_unaccounted_times_of_attempts_do_not_cancel():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).pass_time(3).row(5, 1.0).event("interrupt")
    run.begin(10, startup=5).row(5, 1.0).pass_time(-3).row(5, 1.0).event("finish")
    assert run.ledger().unaccounted_seconds == pytest.approx(0)
    assert not run.ledger().is_fully_accounted


def test_half_a_percent_may_be_unaccounted():
    def missing(seconds):
        return (
            SyntheticRun()
            .begin(0, startup=10)
            .row(90, 1.0)
            .pass_time(seconds)
            .event("finish")
            .ledger()
        )

    assert missing(0.5).is_fully_accounted
    assert not missing(0.51).is_fully_accounted


def test_a_clock_set_back_between_attempts():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).save(1).event("interrupt")
    run.pass_time(-3600).begin(5, startup=5).row(5, 1.0).event("finish")
    found = run.ledger()
    assert found.seconds["down"] == 0
    assert found.wall_seconds == pytest.approx(11 + 10)
    assert found.is_fully_accounted


def test_a_clock_set_back_within_an_attempt_is_reported():
    run = (
        SyntheticRun().begin(0, startup=5).row(50, 1.0).pass_time(-20).row(50, 1.0).event("finish")
    )
    found = run.ledger()
    assert found.seconds["steps"] == pytest.approx(100)
    assert found.unaccounted_seconds == pytest.approx(-20)
    assert not found.is_fully_accounted


def test_repeating_the_command_of_a_finished_run_adds_no_time():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0).event("finish")
    once = run.ledger()
    for _ in range(2):
        run.pass_time(86400).begin(5, startup=5).event("finish")
    assert run.ledger() == once
    run.pass_time(86400).begin(5, startup=5).row(5, 1.0).event("finish")
    assert len(run.ledger().attempts) == 4


def test_a_running_attempt_has_lost_no_time():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0)
    run.pass_time(9).event("checkpoint", stall_seconds=0.5, seconds=9.0)
    assert nonzero_seconds(run.ledger()) == {"startup": 5, "steps": 5, "checkpoint": 0.5}


def test_a_record_without_measurements_is_unaccounted_for():
    run = SyntheticRun().begin(0, startup=5).evaluate(8).row(5, 1.0).save(7).event("finish")
    for row in run.events:
        for key in ("began", "seconds", "stall_seconds"):
            row.pop(key, None)
    found = run.ledger()
    assert nonzero_seconds(found) == {"startup": 1, "steps": 5}
    assert found.unaccounted_seconds == pytest.approx(15)


def test_an_empty_record_has_no_time():
    found = SyntheticRun().ledger()
    assert found.attempts == ()
    assert found.wall_seconds == 0
    assert math.isnan(found.goodput)
    assert found.seconds == dict.fromkeys(TIME_CATEGORIES, 0)


def test_incomplete_rows_are_ignored():
    run = SyntheticRun().begin(0, startup=5).row(5, 1.0)
    broken = [row | {key: None} for row in run.metrics for key in row]
    nameless = [{"step": 1, "time": START}, {"event": "finish", "step": 5}]
    ledger = run.ledger()
    run.metrics += broken
    run.events += nameless
    assert run.ledger() == ledger
