"""The learning rate against the released scheduler's figures."""

import math

import pytest

from hlat.config.schedule import Schedule, Shape
from hlat.schedule import learning_rate

HLAT = Schedule(Shape.hlat, warmup_steps=2000, total_steps=500_000, min_lr_ratio=0.1)
COSINE = Schedule(Shape.cosine, warmup_steps=10, total_steps=110, min_lr_ratio=0.1)


def test_hlat_warm_up_starts_at_zero() -> None:
    assert learning_rate(0, HLAT, 3e-4) == 0
    assert learning_rate(1, HLAT, 3e-4) == pytest.approx(3e-4 / 2000)
    assert learning_rate(2000, HLAT, 3e-4) == pytest.approx(3e-4)


def test_hlat_reaches_its_floor_at_step_397_994() -> None:
    assert learning_rate(397_993, HLAT, 1.0) > 0.1
    assert learning_rate(397_994, HLAT, 1.0) == 0.1
    assert learning_rate(429_153, HLAT, 1.0) == 0.1


def test_hlat_70b_at_the_start_of_upsampling() -> None:
    assert learning_rate(333_786, HLAT, 1.5e-4) == pytest.approx(3.76e-5, rel=2e-3)


def test_hlat_is_the_released_formula() -> None:
    for step in range(2000, 500_000, 9973):
        released = max(0.1, 0.5 * (1 + math.cos(math.pi * (step - 2000) / 498_000)))
        assert learning_rate(step, HLAT, 1.5e-4) == pytest.approx(1.5e-4 * released, rel=1e-12)


def test_cosine_warm_up_ends_at_the_peak() -> None:
    assert learning_rate(0, COSINE, 1.0) == pytest.approx(0.1)
    assert learning_rate(9, COSINE, 1.0) == 1.0
    assert learning_rate(10, COSINE, 1.0) == 1.0


def test_cosine_reaches_its_floor_at_the_horizon() -> None:
    assert learning_rate(60, COSINE, 1.0) == pytest.approx(0.55)
    assert learning_rate(109, COSINE, 1.0) > 0.1
    assert learning_rate(110, COSINE, 1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", [HLAT, COSINE])
def test_stays_at_the_floor_past_the_horizon(schedule: Schedule) -> None:
    for past in (0, 1, 10**6):
        rate = learning_rate(schedule.total_steps + past, schedule, 1.0)
        assert rate == pytest.approx(0.1)


def test_no_warm_up() -> None:
    for shape in Shape:
        assert learning_rate(0, Schedule(shape, 0, 10), 1.0) == 1.0


def test_horizon_within_warm_up() -> None:
    assert learning_rate(5, Schedule(Shape.cosine, 5, 5), 1.0) == 1.0
    assert learning_rate(6, Schedule(Shape.cosine, 5, 5), 1.0) == pytest.approx(0.1)
