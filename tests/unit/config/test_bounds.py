"""Bounds of fields apply to values, items of lists and dictionaries, and nested dataclasses."""

from dataclasses import dataclass, field

import pytest

from hlat.config.bounds import Bounds, bounded, find_bounds_violations

INF = float("inf")


@dataclass
class Inner:
    weight: float = bounded(1.0, min=0, below=INF)


@dataclass
class Outer:
    count: int | None = bounded(1, min=1)
    rates: dict[str, float] = bounded({}, above=0, below=1)  # noqa: RUF009 (a field)
    parts: list[Inner] = field(default_factory=list)
    named: dict[str, Inner] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (Bounds(min=0, max=1), [0, 0.5, 1], [-0.1, 1.1, INF], "[0, 1]"),
        (Bounds(min=0, below=1), [0, 0.9], [-1, 1], "[0, 1)"),
        (Bounds(above=0, below=INF), [1e-9, 1e9], [0, -1, INF], "(0, inf)"),
        (Bounds(min=2), [2, 3, INF], [1, -INF], "[2, inf)"),
    ],
)
def test_intervals(bounds, inside, outside, text):
    assert str(bounds) == text
    assert all(value in bounds for value in inside)
    assert not any(value in bounds for value in [*outside, float("nan")])


def test_violations_have_full_keys():
    outer = Outer(0, {"a": 0.5, "b": 1.0}, [Inner(), Inner(-1)], {"x": Inner(INF)})
    assert [*find_bounds_violations(outer, "run.")] == [
        "run.count=0 is too small; use 1 or more",
        "run.rates.b=1.0 is outside (0, 1)",
        "run.parts.1.weight=-1 is outside [0, inf)",
        "run.named.x.weight=inf is outside [0, inf)",
    ]
    assert not [*find_bounds_violations(Outer(None))]
