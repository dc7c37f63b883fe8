"""Tests of the time left of a run, with a clock that the test sets."""

import time

import pytest

from hlat.tracking.console_logger import TimeLeft


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose only element is the time."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def train(time_left: TimeLeft, clock: list[float], steps: range, seconds: float) -> None:
    for step in steps:
        clock[0] += seconds
        time_left.add_row(step, seconds)


def test_compilation_in_the_first_step_is_not_extrapolated(clock: list[float]) -> None:
    time_left = TimeLeft(0, 100)
    train(time_left, clock, range(1, 2), 60.0)
    assert time_left.estimate() is None
    train(time_left, clock, range(2, 5), 0.5)
    assert time_left.estimate() is None
    train(time_left, clock, range(5, 6), 0.5)
    assert time_left.estimate() == pytest.approx(95 * 0.5)


def test_the_first_row_of_several_steps_gives_no_estimate(clock: list[float]) -> None:
    time_left = TimeLeft(40, 100)
    train(time_left, clock, range(50, 51), 6.0)
    assert time_left.estimate() is None
    clock[0] += 10 * 0.5
    time_left.add_row(60, 0.5)
    assert time_left.estimate() == pytest.approx(40 * 0.5)


def test_one_slow_step_counts_by_its_share_only(clock: list[float]) -> None:
    time_left = TimeLeft(0, 100)
    train(time_left, clock, range(1, 11), 1.0)
    train(time_left, clock, range(11, 12), 50.0)
    assert time_left.estimate() == pytest.approx(89 * 1.0)


def test_evaluations_and_saves_are_included(clock: list[float]) -> None:
    """Count 5 s after each tenth step."""
    time_left = TimeLeft(0, 101)
    for step in range(1, 52):
        train(time_left, clock, range(step, step + 1), 1.0)
        clock[0] += 5.0 if step % 10 == 1 and step > 1 else 0.0
    assert time_left.estimate() == pytest.approx(50 * (1.0 + 5 * 5.0 / 50))
