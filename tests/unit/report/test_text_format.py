"""Formats of numbers and times."""

import math

import pytest

from hlat.report.text_format import (
    format_count,
    format_decimal,
    format_duration,
    format_short,
    format_timestamp,
    format_value,
)


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
    assert format_short(value) == text


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
    assert format_duration(seconds) == text


def test_count_decimal_and_timestamp() -> None:
    assert format_count(1234567.0) == "1,234,567"
    assert format_decimal(2.0) == "2.000"
    assert format_timestamp(1_763_654_400.0) == "2025-11-20 16:00:00"
    assert [format_count(math.nan), format_decimal(math.nan), format_timestamp(math.nan)] == [
        "n/a"
    ] * 3


def test_values_are_one_line() -> None:
    assert format_value({"a": [1, 2.5, None], "b": True}) == "a 1, 2.5, n/a, b yes"
    assert format_value("text") == "text"
