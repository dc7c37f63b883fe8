"""A run writes its report at its end, unless a sweep writes a comparison."""

import pytest

from hlat.config.resolve import resolve_config
from hlat.report.end_report import writes_report
from hlat.tracking.sweep_log import SWEEP_POINT_VARIABLE


@pytest.mark.parametrize(
    ("setting", "is_point", "expected"),
    [
        ("null", False, True),
        ("null", True, False),
        ("true", True, True),
        ("false", False, False),
    ],
)
def test_points_of_a_sweep_write_a_report_on_request(
    compose, monkeypatch, setting: str, is_point: bool, expected: bool
) -> None:
    monkeypatch.delenv(SWEEP_POINT_VARIABLE, raising=False)
    if is_point:
        monkeypatch.setenv(SWEEP_POINT_VARIABLE, "1")
    config = resolve_config(compose(f"tracking.report={setting}"))
    assert writes_report(config) is expected
