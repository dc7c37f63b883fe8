"""Failure reasons of supervisors, and cleanup after dead supervisors."""

import fcntl
import json
import os
import signal
import subprocess
import tempfile
from types import SimpleNamespace

import pytest
import torch

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.resolve import resolve_config
from hlat.recovery.supervisor import Supervisor, _make_records_dir, launch_workers


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
        with _make_records_dir() as own:
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {
                "hlat-supervisor-alive",
                "hlat-supervisor-begun",
                "hlat-x",
                own.name,
            }
            with _make_records_dir() as other:
                assert other != own
            assert own.exists()
    assert not own.exists()


@pytest.mark.parametrize("found", [0, 7])
def test_a_machine_without_the_devices_of_the_hardware_starts_no_process(
    compose, tmp_path, monkeypatch, found
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: found)
    config = resolve_config(compose("hardware=h100_p5", f"run.root={tmp_path}"))
    expected = rf"hardware=p5\.48xlarge has 8 GPUs per node, and torch finds {found or 'none'} on"
    with pytest.raises(ConfigError, match=expected):
        launch_workers(config, ["false"])
    assert not any(tmp_path.iterdir())


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
        with _make_records_dir():
            assert processes["dead"].wait(10) == -signal.SIGKILL
            assert processes["alive"].poll() is None
    processes["alive"].kill()
    processes["alive"].wait()


def test_workers_start_with_the_variables_of_compiler_and_recipe(
    compose, small, tmp_path, monkeypatch
):
    overrides = ("compiler=neuron_2_33", "precision=bf16_sr", f"run.root={tmp_path}")
    config = resolve_config(
        compose(*small, *overrides, "+compiler.environment.MALLOC_ARENA_MAX='64'")
    )
    environment = {}

    def supervise() -> ExitCode:
        environment.update(os.environ)
        return ExitCode.FINISHED

    supervisor = SimpleNamespace(
        supervise=supervise, forward_signal=signal.SIG_IGN, request_stacks=signal.SIG_IGN
    )
    monkeypatch.setattr("hlat.recovery.supervisor.Supervisor", lambda *_: supervisor)
    assert launch_workers(config, []) is ExitCode.FINISHED
    expected = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1", "MALLOC_ARENA_MAX": "64"}
    assert expected.items() <= environment.items()
    assert not expected.items() <= os.environ.items()


def test_a_kill_for_lack_of_memory_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("hlat.recovery.supervisor._count_oom_kills", lambda: 3)
    failures = {1: SimpleNamespace(exitcode=-signal.SIGKILL)}
    for before, cause in ((3, "SIGKILL"), (2, "SIGKILL (out of memory)")):
        supervisor = SimpleNamespace(
            _hang_reason=None, _num_oom_kills=before, _records_dir=tmp_path
        )
        reason = Supervisor._diagnose_failure(supervisor, failures).reason
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
    supervisor = SimpleNamespace(_hang_reason=None, _num_oom_kills=0, _records_dir=tmp_path)
    failures = {rank: SimpleNamespace(exitcode=code) for rank, code in codes.items()}
    assert Supervisor._diagnose_failure(supervisor, failures).reason.startswith(reason)


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
    supervisor = SimpleNamespace(_hang_reason=None, _num_oom_kills=0, _records_dir=tmp_path)
    failures = {rank: SimpleNamespace(exitcode=code) for rank, code in codes.items()}
    assert Supervisor._diagnose_failure(supervisor, failures).exit is exit_code


@pytest.mark.parametrize(("stop_time", "exit_code"), [(1.0, 75), (3.0, 1)])
def test_the_first_record_decides_between_a_stop_and_an_exception(tmp_path, stop_time, exit_code):
    """TorchElastic stops the peers of a rank that raised; peers of a stopped rank raise."""
    fields = {"problems": None, "trace": "Traceback\nError\n"}
    (tmp_path / "0.json").write_text(json.dumps(fields | {"exit": 1, "time": 2.0}))
    (tmp_path / "1.json").write_text(json.dumps(fields | {"exit": 75, "time": stop_time}))
    supervisor = SimpleNamespace(_hang_reason=None, _num_oom_kills=0, _records_dir=tmp_path)
    failures = {0: SimpleNamespace(exitcode=1), 1: SimpleNamespace(exitcode=75)}
    assert Supervisor._diagnose_failure(supervisor, failures).exit == exit_code


def test_a_signal_before_the_workers_start_is_forwarded_to_them(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    workers = [SimpleNamespace(id=None)]
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._received_signal, supervisor._signaled_ids = None, []
    monkeypatch.setattr(supervisor, "get_worker_group", lambda: SimpleNamespace(workers=workers))
    supervisor.forward_signal(signal.SIGUSR1, None)
    assert not sent
    workers[0].id = 7
    for _ in range(2):
        supervisor._forward_early_signal()
    assert sent == [(7, signal.SIGUSR1)]
