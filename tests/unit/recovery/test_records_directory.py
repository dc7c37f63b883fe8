"""Cleanup after dead supervisors."""

import fcntl
import os
import signal
import subprocess
import tempfile

from hlat.recovery.records_directory import create_records_dir


def test_only_directories_of_dead_supervisors_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (
        "hlat-supervisor-dead",
        "hlat-supervisor-alive",
        "hlat-supervisor-begun",
        "hlat-x",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.pulse").touch()
    (tmp_path / "hlat-supervisor-dead/alive").touch()
    with (tmp_path / "hlat-supervisor-alive/alive").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with create_records_dir() as own:
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {
                "hlat-supervisor-alive",
                "hlat-supervisor-begun",
                "hlat-x",
                own.name,
            }
            with create_records_dir() as other:
                assert other != own
            assert own.exists()
    assert not own.exists()


def test_processes_of_dead_supervisors_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes = {}
    for name in ("dead", "alive"):
        records = tmp_path / f"hlat-supervisor-{name}"
        records.mkdir()
        (records / "alive").touch()
        environment = os.environ | {"HLAT_RECORDS": str(records)}
        processes[name] = subprocess.Popen(["sleep", "60"], env=environment)
        processes[name].send_signal(signal.SIGSTOP)  # so early that it cannot see to itself
    with (tmp_path / "hlat-supervisor-alive/alive").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with create_records_dir():
            assert processes["dead"].wait(10) == -signal.SIGKILL
            assert processes["alive"].poll() is None
    processes["alive"].kill()
    processes["alive"].wait()
