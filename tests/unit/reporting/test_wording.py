"""Numbers and times as people read them."""

import math

import pytest

from hlat.reporting.wording import anything, duration, exact, moment, short, whole


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.5, "1.5"),
        (2.71828, "2.718"),
        (8192.0, "8192"),
        (16_384.0, "16.38k"),
        (1_840_000_000_000.0, "1.84T"),
        (-2_500_000.0, "-2.5M"),
        (3e-4, "3e-4"),
        (-1.25e-10, "-1.25e-10"),
        (0.001, "0.001"),
        (math.nan, "n/a"),
        (math.inf, "n/a"),
    ],
)
def test_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.25 s"),
        (59.4, "59.4 s"),
        (60.0, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (93_784.0, "26 h 3 min"),
        (math.nan, "n/a"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_whole_exact_and_moment() -> None:
    assert whole(1234567.0) == "1,234,567"
    assert exact(2.0) == "2.000"
    assert moment(1_763_654_400.0) == "2025-11-20 16:00:00"
    assert [whole(math.nan), exact(math.nan), moment(math.nan)] == ["n/a"] * 3


def test_anything_is_one_line() -> None:
    assert anything({"a": [1, 2.5, None], "b": True}) == "a 1, 2.5, n/a, b yes"
    assert anything("text") == "text"
