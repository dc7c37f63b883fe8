"""Name, limits and processes of a node."""

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hlat.recovery import host_info

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


def test_the_scheduler_names_the_node() -> None:
    assert host_info.get_host_name({"SLURMD_NODENAME": "trn-007"}) == "trn-007"
    assert host_info.get_host_name({}) == socket.gethostname()


def test_the_limit_of_open_files_is_raised_up_to_the_hard_limit() -> None:
    code = (
        "import resource as r; from hlat.recovery.host_info import raise_open_file_limit as allow\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (50, 300))\n"
        "print(allow(40), allow(200), r.getrlimit(r.RLIMIT_NOFILE)[0], allow(5000), allow(1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["50", "200", "200", "300", "300"]


def test_unlimited_open_files(monkeypatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert host_info.raise_open_file_limit(10**6) >= 10**6


@linux
def test_ancestors_of_a_process() -> None:
    assert host_info.list_ancestor_pids()[:2] == [os.getpid(), os.getppid()]
    assert 1 in host_info.list_ancestor_pids() or Path("/.dockerenv").exists()


@linux
def test_the_same_command_in_the_same_directory_is_the_same_run(tmp_path) -> None:
    """Start the same run, another run, the same command in another directory, and the search."""
    (tmp_path / "other").mkdir()
    sleep = "import sys, time; print(0, flush=True); time.sleep(60)"
    search = "from hlat.recovery import host_info; print(*host_info.list_same_command_pids())"

    def start(folder: Path, code: str, *overrides: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", code, "-m", "hlat.train", *overrides]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        )

    sleepers = [
        start(tmp_path, sleep, "run.name=x"),
        start(tmp_path, sleep, "run.name=y"),
        start(tmp_path / "other", sleep, "run.name=x"),
    ]
    try:
        for sleeper in sleepers:
            assert sleeper.stdout is not None
            sleeper.stdout.readline()
        output, _ = start(tmp_path, search, "run.name=x").communicate()
        assert [int(word) for word in output.split()] == [sleepers[0].pid]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.communicate()


def test_a_process_that_does_not_train_finds_no_run(monkeypatch) -> None:
    begun = time.perf_counter()
    assert host_info.list_same_command_pids() == []
    assert time.perf_counter() - begun < 1
