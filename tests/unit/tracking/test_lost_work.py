"""Tests of lost work and steps per row."""

from hlat.tracking.lost_work import (
    compute_attempt_seconds,
    compute_lost_work,
    compute_steps_per_row,
    exclude_rolled_back_events,
    find_events_after_last_attempt,
    get_stall_seconds,
    is_finished,
)


def row(step, attempt=1):
    return {"step": step, "attempt": attempt, "step_seconds": 0.5, "time": 1000.0 + step}


def test_a_run_is_finished_if_its_last_attempt_is():
    names = ["start", "ready", "checkpoint", "finish", "score"]
    assert is_finished([{"event": name} for name in names])
    assert is_finished([{"event": name} for name in (*names, "resume", "finish")])
    for end in ([], ["interrupt"], ["diverge"], ["restart"]):
        assert not is_finished([{"event": name} for name in (*names, "resume", *end)])
    assert not is_finished([])


def test_steps_per_row_start_at_previous_row_or_attempt_start():
    events = [
        {"event": "start", "step": 0, "attempt": 1},
        {"event": "resume", "step": 20, "attempt": 2},
    ]
    steps, attempts = [10, 20, 25, 40], [1, 1, 2, 2]
    assert compute_steps_per_row(steps, attempts, events) == [10, 10, 5, 15]
    assert compute_steps_per_row(steps[1:], attempts[1:], events, after=10) == [10, 5, 15]
    assert compute_steps_per_row(steps, attempts, []) == [10, 10, 5, 15]
    assert compute_steps_per_row(steps[:0], attempts[:0], events) == []


def test_steps_per_row_of_interleaved_attempts():
    steps, attempts = [10, 5, 20, 15], [2, 1, 2, 1]
    events = [{"event": "start", "step": 0, "attempt": 1}]
    assert compute_steps_per_row(steps, attempts, events) == [10, 5, 10, 10]


def test_rolled_back_events_are_excluded():
    events = [
        {"event": "evaluate", "step": 5},
        {"event": "evaluate", "step": 10},
        {"event": "resume", "step": 5, "lost_steps": 5},
        {"event": "evaluate", "step": 10},
        {"event": "resume", "step": 10, "lost_steps": 0},
    ]
    assert exclude_rolled_back_events(events) == [events[0], events[2], events[3], events[4]]


def test_stall_seconds_of_events():
    assert get_stall_seconds({"event": "evaluate", "seconds": 2}) == 2
    assert get_stall_seconds({"event": "checkpoint", "seconds": 9.0, "stall_seconds": 3.0}) == 3
    assert get_stall_seconds({"event": "checkpoint", "seconds": 9.0}) == 0
    assert get_stall_seconds({"event": "evaluate", "seconds": None}) == 0
    assert get_stall_seconds({"event": "finish", "seconds": 4.0}) == 0


def test_no_removed_rows_are_no_lost_work():
    events = [{"event": "start", "step": 0, "attempt": 1}]
    assert compute_lost_work([], events, 5) == {
        "lost_steps": 0,
        "lost_seconds": 0,
        "lost_by_attempt": {},
    }


def test_attempt_seconds_exclude_gaps_between_attempts():
    rows = [
        {"event": "start", "attempt": 1, "began": 100.0, "time": 110.0},
        {"step": 1, "attempt": 1, "time": 150.0},
        {"event": "resume", "attempt": 2, "began": 1000.0, "time": 1001.0},
        {"event": "resume", "attempt": 3, "time": 2000.0},
        {"step": 2, "attempt": 3, "time": 2007.0},
    ]
    assert compute_attempt_seconds(rows) == 50.0 + 1.0 + 7.0
    assert compute_attempt_seconds([]) == 0.0


def test_scores_do_not_extend_an_attempt():
    rows = [
        {"event": "start", "attempt": 1, "began": 100.0, "time": 110.0, "step": 0},
        {"event": "score", "time": 120.0, "step": 5},
        {"event": "finish", "attempt": 1, "time": 130.0, "step": 9},
        {"event": "score", "time": 9000.0, "step": 9},
    ]
    assert compute_attempt_seconds(rows) == 30.0
    assert find_events_after_last_attempt(rows) == rows[3:]
