"""Ids of ancestors, and of processes with the same command."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hlat.recovery import process_ids

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


@linux
def test_ancestors_of_a_process() -> None:
    assert process_ids.list_ancestor_pids()[:2] == [os.getpid(), os.getppid()]
    assert 1 in process_ids.list_ancestor_pids() or Path("/.dockerenv").exists()


@linux
def test_the_same_command_in_the_same_directory_is_the_same_run(tmp_path) -> None:
    """Start the same run, another run, the same command in another directory, and the search."""
    (tmp_path / "other").mkdir()
    sleep = "import sys, time; print(0, flush=True); time.sleep(60)"
    search = "from hlat.recovery import process_ids; print(*process_ids.list_same_command_pids())"

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
    assert process_ids.list_same_command_pids() == []
    assert time.perf_counter() - begun < 1
