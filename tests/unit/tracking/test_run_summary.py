"""Tests of the summary of a run and of the condition under which the run writes a report."""

import pytest

from hlat.config.config_errors import ExitCode
from hlat.config.resolve import resolve_config
from hlat.tracking.run_summary import print_summary, writes_report
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


def test_summary_does_not_name_the_report_of_an_earlier_attempt(compose, tmp_path, capsys) -> None:
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "report.html").touch()
    for setting, expected in (
        ("true", tmp_path / "report.html"),
        ("false", f"hlat report {tmp_path}"),
    ):
        config = resolve_config(compose(f"tracking.report={setting}"))
        print_summary(tmp_path, config, [], ExitCode.FINISHED, 5, "")
        assert f"report:        {expected}\n" in capsys.readouterr().out
