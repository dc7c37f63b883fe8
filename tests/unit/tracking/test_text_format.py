"""Formats of numbers and times."""

import math

import pytest

from hlat.tracking.text_format import (
    format_count,
    format_decimal,
    format_duration,
    format_setting,
    format_short,
    format_table,
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        (3e-4, "3e-4"),
        (0.00025, "2.5e-4"),
        (0.123456, "0.123456"),
        (16_384.0, "16384"),
        (1e20, "1e+20"),
        ([1, 0.5, "x"], "[1,0.5,x]"),
        ({"code": 0.5}, "{code:0.5}"),
    ],
)
def test_settings_are_written_as_overrides(value: object, text: str) -> None:
    assert format_setting(value) == text


@pytest.mark.parametrize("columns", [45, 60, 80])
def test_tables_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the words of each column, which no width changes."""
    monkeypatch.setenv("COLUMNS", str(columns))
    headers = ["Run", "Held-out bits per byte", "Verdict", "Steps"]
    rows = [["tiny-12345678", "1.2345 (1.1 to 1.4)", "not decided: 5 more seeds", "100"]] * 2
    lines = format_table(headers, rows)
    assert max(map(len, lines)) <= columns
    words = sorted(" ".join(lines).split())
    num_blocks = lines.count("") + 1
    expected = " ".join([*headers, *rows[0], *rows[1]]).split()
    expected += ["Run", "tiny-12345678", "tiny-12345678"] * (num_blocks - 1)
    assert words == sorted(expected)


def test_a_table_that_fits_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a verdict with seven words in it"
    rows = [["a", text], ["bb", "z"]]
    monkeypatch.setenv("COLUMNS", "38")
    assert format_table(["Name", "Q"], rows) == ["Name  Q", f"a     {text}", "bb    z"]
    monkeypatch.setenv("COLUMNS", "37")
    wrapped = ["Name  Q", f"a     {text[:-3]}", "      it", "bb    z"]
    assert format_table(["Name", "Q"], rows) == wrapped


def test_columns_that_do_not_fit_follow_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "9")
    assert format_table(["A", "Bbb", "Ccc"], [["x", "1", "2"]]) == [
        *("A  Bbb", "x  1", ""),
        *("A  Ccc", "x  2"),
    ]
