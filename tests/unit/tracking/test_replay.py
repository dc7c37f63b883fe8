"""What going back costs, from rows made by hand."""

from hlat.tracking.replay import blocked_seconds, lost, standing, steps_covered


def row(step, attempt=1):
    return {"step": step, "attempt": attempt, "step_seconds": 0.5, "time": 1000.0 + step}


def test_a_row_covers_the_steps_since_the_one_before_or_since_its_attempt_began():
    events = [
        {"event": "start", "step": 0, "attempt": 1},
        {"event": "resume", "step": 20, "attempt": 2},
    ]
    rows = [row(10), row(20), row(25, attempt=2), row(40, attempt=2)]
    assert steps_covered(rows, events) == [10, 10, 5, 15]
    assert steps_covered(rows[1:], events, after=10) == [10, 5, 15]
    assert steps_covered(rows, []) == [10, 10, 5, 15]


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
