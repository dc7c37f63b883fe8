"""Failure reasons and exit codes from the ends of several workers."""

import json
import signal

import pytest

from hlat.config.config_errors import ExitCode
from hlat.recovery.failure_diagnosis import diagnose_failure


def test_a_kill_for_lack_of_memory_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("hlat.recovery.failure_diagnosis.count_oom_kills", lambda: 3)
    for before, cause in ((3, "SIGKILL"), (2, "SIGKILL (out of memory)")):
        reason = diagnose_failure({1: -signal.SIGKILL}, tmp_path, before).reason
        assert reason == f"rank 1 was killed by {cause}"


@pytest.mark.parametrize(
    ("codes", "reason"),
    [
        ({0: 1, 1: -signal.SIGTERM}, "rank 0 raised ValueError: no"),
        ({1: -signal.SIGTERM}, "rank 0 raised ValueError: no"),
        ({0: 1, 1: -signal.SIGKILL}, "rank 1 was killed by SIGKILL"),
        ({0: -signal.SIGTERM, 1: -signal.SIGKILL}, "rank 1 was killed by SIGKILL"),
        ({1: -signal.SIGBUS}, "rank 1 was killed by SIGBUS (a mapped file was truncated, or its"),
    ],
)
def test_the_cause_is_reported_and_not_its_consequences(tmp_path, codes, reason):
    """TorchElastic terminates the peers of a rank that raised; peers of a killed rank raise."""
    record = {"exit": 1, "time": 1.0, "problems": None, "trace": "Traceback\nValueError: no\n"}
    (tmp_path / "0.json").write_text(json.dumps(record))
    assert diagnose_failure(codes, tmp_path, 0).reason.startswith(reason)


@pytest.mark.parametrize(
    ("codes", "exit_code"),
    [
        ({1: ExitCode.PREEMPTED}, ExitCode.PREEMPTED),  # before it could write a record
        ({1: -signal.SIGUSR1}, ExitCode.PREEMPTED),  # before it handled signals
        ({1: -signal.SIGTERM}, ExitCode.PREEMPTED),
        ({0: 1, 1: -signal.SIGTERM}, ExitCode.FAILED),  # TorchElastic terminated rank 1
        ({1: -signal.SIGKILL}, ExitCode.FAILED),
    ],
)
def test_a_worker_that_a_signal_stops_is_not_a_crash(tmp_path, codes, exit_code):
    assert diagnose_failure(codes, tmp_path, 0).exit is exit_code


@pytest.mark.parametrize(("stop_time", "exit_code"), [(1.0, 75), (3.0, 1)])
def test_the_first_record_decides_between_a_stop_and_an_exception(tmp_path, stop_time, exit_code):
    """TorchElastic stops the peers of a rank that raised; peers of a stopped rank raise."""
    fields = {"problems": None, "trace": "Traceback\nError\n"}
    (tmp_path / "0.json").write_text(json.dumps(fields | {"exit": 1, "time": 2.0}))
    (tmp_path / "1.json").write_text(json.dumps(fields | {"exit": 75, "time": stop_time}))
    assert diagnose_failure({0: 1, 1: 75}, tmp_path, 0).exit == exit_code
