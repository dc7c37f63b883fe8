"""Test that killed workers lose no batch and leave no process or memory."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hlat.config.config_errors import ConfigError
from hlat.data.batch_producer import WorkerDiedError
from hlat.distributed.process_signals import STOP_SIGNALS

REPOSITORY = Path(__file__).resolve().parents[3]


def get_worker_pids(loader) -> list[int]:
    return [worker._process.pid for worker in loader._producer._workers]


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for_exit(processes: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_running, processes))


def read_rows(loader, steps):
    return [loader.next_batch().tokens for _ in range(steps)]


@pytest.mark.slow
def test_killed_workers_lose_no_batch(corpora, open_loader, caplog) -> None:
    plain = open_loader(corpora.data())
    expected = read_rows(plain, 30)
    one = open_loader(corpora.data(workers=2, prefetch=2))
    rng, found = random.Random(0), []
    for steps in (1, 12, 17):
        found += read_rows(one, steps)
        os.kill(rng.choice(get_worker_pids(one)), signal.SIGKILL)
    np.testing.assert_array_equal(found, expected)
    found_after = read_rows(one, 5)
    np.testing.assert_array_equal(found_after, read_rows(plain, 5))
    messages = {record.getMessage() for record in caplog.records}
    assert messages == {
        "a data worker was killed, probably by the system for want of memory; starting it again"
    }


@pytest.mark.slow
def test_signals_of_the_trainer_do_not_stop_workers(corpora, open_loader, caplog) -> None:
    one = open_loader(corpora.data(workers=1, prefetch=1))
    read_rows(one, 1)
    before = get_worker_pids(one)
    for number in STOP_SIGNALS:
        os.kill(before[0], number)
    read_rows(one, 3)
    assert get_worker_pids(one) == before
    assert not caplog.records


@pytest.mark.slow
def test_repeated_worker_failures_are_an_error_with_a_remedy(
    corpora, open_loader, monkeypatch
) -> None:
    one = open_loader(corpora.data(workers=1))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        WorkerDiedError, match=r"every time that they prepare batch 0; data\.workers=0"
    ):
        one.next_batch()
    monkeypatch.undo()
    assert one.next_batch().tokens.shape == (4, 32)


@pytest.mark.slow
def test_errors_of_workers_are_raised(corpora, open_loader) -> None:
    one = open_loader(corpora.data(workers=1))
    for name in ("a", "b"):
        (corpora.root / f"beta/{name}.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data\.sources\.beta\.paths: no file matches"):
        one.next_batch()


@pytest.mark.slow
def test_close_stops_the_processes(corpora, open_loader) -> None:
    one = open_loader(corpora.data(workers=3, prefetch=4))
    read_rows(one, 2)
    processes = get_worker_pids(one)
    assert len(processes) == 3
    os.kill(processes[0], signal.SIGSTOP)
    one.close()
    assert not any(map(is_running, processes))


@pytest.mark.slow
def test_workers_are_limited_to_the_number_of_rows(corpora, open_loader) -> None:
    one = open_loader(corpora.data(workers=9), dp_rank=1, dp_world_size=2)
    read_rows(one, 1)
    assert len(get_worker_pids(one)) == 2


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.slow_after(1)
def test_a_killed_trainer_leaves_no_process_and_no_memory(corpora, tmp_path, stop: bool) -> None:
    """Include a stopped worker, which does not receive the end of its standard input."""
    program = f"""
import sys
from hlat.config.batch import BatchConfig
from hlat.config.data import DataConfig, SourceConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data.data_loader import build_data_loader
data = DataConfig("x", {str(corpora.root)!r}, {{"alpha": SourceConfig(["alpha"])}}, tokenizer="embedded",
            eos_token="<|endoftext|>", heldout_documents=3, workers=2)
one = build_data_loader(data, PhaseConfig("p", [PhaseStage("s")]), BatchConfig(4, 1, 32), 1)
one.next_batch()
print(*[worker._process.pid for worker in one._producer._workers], flush=True)
sys.stdin.read()
"""
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    trainer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert trainer.stdout is not None
    processes = [int(word) for word in trainer.stdout.readline().split()]
    assert len(processes) == 2
    assert all(map(is_running, processes))
    if stop:
        os.kill(processes[1], signal.SIGSTOP)
    trainer.kill()
    trainer.communicate()
    assert wait_for_exit(processes)
    if shared:
        assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.slow  # starts processes
def test_files_added_during_a_run_are_an_error(corpora, open_loader) -> None:
    """Change the files before a restarted worker opens them."""
    expected = open_loader(corpora.data())
    one = open_loader(corpora.data(workers=2, prefetch=0))
    np.testing.assert_array_equal(read_rows(one, 3), read_rows(expected, 3))
    before = one.state_dict()
    extra = (corpora.root / "beta/a.arrow").read_bytes()
    (corpora.root / "beta/c.arrow").write_bytes(extra)
    os.kill(get_worker_pids(one)[0], signal.SIGKILL)
    with pytest.raises(ConfigError, match=r"data\.sources\.beta: has changed since the run began"):
        one.next_batch()
    (corpora.root / "beta/c.arrow").unlink()
    assert one.state_dict() == before
    np.testing.assert_array_equal(read_rows(one, 3), read_rows(expected, 3))


@pytest.mark.slow
def test_workers_do_not_import_from_the_working_directory(
    corpora, open_loader, tmp_path, monkeypatch
) -> None:
    (tmp_path / "hlat").mkdir()
    (tmp_path / "hlat/__init__.py").write_text("raise ImportError('another hlat')")
    (tmp_path / "json.py").write_text("raise ImportError('another json')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # set by the user
    assert open_loader(corpora.data(workers=1)).next_batch().tokens.shape == (4, 32)


def test_failed_start_leaks_no_file_descriptors(corpora, open_loader, monkeypatch) -> None:
    one = open_loader(corpora.data(workers=1))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerDiedError):
        one.next_batch()
    assert len(os.listdir("/proc/self/fd")) == before
