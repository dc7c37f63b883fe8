"""What going back costs, from rows made by hand."""

import numpy as np

from hlat.tracking.replay import (
    blocked_seconds,
    lost,
    seconds_alive,
    standing,
    steps_covered,
    written_between,
)


def row(step, attempt=1):
    return {"step": step, "attempt": attempt, "step_seconds": 0.5, "time": 1000.0 + step}


def test_a_row_covers_the_steps_since_the_one_before_or_since_its_attempt_began():
    events = [
        {"event": "start", "step": 0, "attempt": 1},
        {"event": "resume", "step": 20, "attempt": 2},
    ]
    steps, attempts = np.array([10.0, 20, 25, 40]), np.array([1.0, 1, 2, 2])
    assert steps_covered(steps, attempts, events).tolist() == [10, 10, 5, 15]
    assert steps_covered(steps[1:], attempts[1:], events, after=10).tolist() == [10, 5, 15]
    assert steps_covered(steps, attempts, []).tolist() == [10, 10, 5, 15]
    assert steps_covered(steps[:0], attempts[:0], events).tolist() == []


def test_rows_of_attempts_may_lie_among_each_other():
    steps, attempts = np.array([10.0, 5, 20, 15]), np.array([2.0, 1, 2, 1])
    events = [{"event": "start", "step": 0, "attempt": 1}]
    assert steps_covered(steps, attempts, events).tolist() == [10, 5, 10, 10]


def test_events_stand_until_a_run_goes_back_behind_them():
    events = [
        {"event": "evaluate", "step": 5},
        {"event": "evaluate", "step": 10},
        {"event": "resume", "step": 5, "lost_steps": 5},
        {"event": "evaluate", "step": 10},
        {"event": "resume", "step": 10, "lost_steps": 0},
    ]
    assert standing(events) == [events[0], events[2], events[3], events[4]]


def test_only_what_says_so_blocks():
    assert blocked_seconds({"event": "evaluate", "seconds": 2}) == 2
    assert blocked_seconds({"event": "checkpoint", "seconds": 9.0, "stall_seconds": 3.0}) == 3
    assert blocked_seconds({"event": "checkpoint", "seconds": 9.0}) == 0
    assert blocked_seconds({"event": "evaluate", "seconds": None}) == 0
    assert blocked_seconds({"event": "finish", "seconds": 4.0}) == 0


def test_nothing_dropped_costs_nothing():
    events = [{"event": "start", "step": 0, "attempt": 1}]
    assert lost([], events, 5) == {"lost_steps": 0, "lost_seconds": 0, "lost_by_attempt": {}}


def test_a_run_is_paid_for_while_an_attempt_is_alive():
    rows = [
        {"event": "start", "attempt": 1, "began": 100.0, "time": 110.0},
        {"step": 1, "attempt": 1, "time": 150.0},
        {"event": "resume", "attempt": 2, "began": 1000.0, "time": 1001.0},
        {"event": "resume", "attempt": 3, "time": 2000.0},
        {"step": 2, "attempt": 3, "time": 2007.0},
    ]
    assert seconds_alive(rows) == 50.0 + 1.0 + 7.0
    assert seconds_alive([]) == 0.0


def test_scores_are_no_sign_of_life_and_are_heard_of_in_the_next_attempt():
    rows = [
        {"event": "start", "attempt": 1, "began": 100.0, "time": 110.0, "step": 0},
        {"event": "score", "time": 120.0, "step": 5},
        {"event": "finish", "attempt": 1, "time": 130.0, "step": 9},
        {"event": "score", "time": 9000.0, "step": 9},
    ]
    assert seconds_alive(rows) == 30.0
    assert written_between(rows) == rows[3:]
