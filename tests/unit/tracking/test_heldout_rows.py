"""Comparison of evaluations on the same text."""

import pytest

from hlat.tracking.heldout_rows import find_worse_sources, get_loop_row

FIRST = {"bits_per_byte": {"code": 2.0, "news": 8.362, "mean": 5.181}}
LAST = {
    "bits_per_byte": {"code": 2.1, "news": 9.1, "mean": 5.6},
    "loop": {"bits_per_byte": {"code": 1.9, "news": 9.009, "mean": 5.4545}},
}


def test_the_last_evaluation_is_compared_on_the_text_of_the_first() -> None:
    assert get_loop_row(FIRST) is FIRST
    assert find_worse_sources(FIRST, LAST) == {"news": [8.362, 9.009]}
    assert find_worse_sources(FIRST, FIRST) == {}
    assert find_worse_sources(FIRST, {"bits_per_byte": {"news": 8.3621}}) == {}


@pytest.mark.parametrize("value", [None, "x", float("nan")])
def test_values_that_are_not_finite_are_not_compared(value: object) -> None:
    row = {"bits_per_byte": {"code": value}, "loop": value}
    assert find_worse_sources(row, LAST) == {}
    assert find_worse_sources(FIRST, row) == {}
    assert find_worse_sources({}, LAST) == {}
