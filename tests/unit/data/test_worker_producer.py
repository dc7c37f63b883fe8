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

REPOSITORY = Path(__file__).resolve().parents[3]


def pids(loader) -> list[int]:
    return [worker._process.pid for worker in loader._producer._workers]


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(processes: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_running, processes))


def draw(loader, steps):
    return [loader.next_batch().tokens for _ in range(steps)]


def test_killed_workers_cost_no_batch(corpora, open_loader, caplog) -> None:
    plain = open_loader(corpora.data())
    expected = draw(plain, 30)
    one = open_loader(corpora.data(workers=2, prefetch=2))
    rng, found = random.Random(0), []
    for steps in (1, 12, 17):
        found += draw(one, steps)
        os.kill(rng.choice(pids(one)), signal.SIGKILL)
    np.testing.assert_array_equal(found, expected)
    found_after = draw(one, 5)
    np.testing.assert_array_equal(found_after, draw(plain, 5))
    told = {record.getMessage() for record in caplog.records}
    assert told == {
        "a data worker was killed, probably by the system for want of memory; starting it again"
    }


def test_the_signals_of_the_trainer_are_not_for_workers(corpora, open_loader, caplog) -> None:
    one = open_loader(corpora.data(workers=1, prefetch=1))
    draw(one, 1)
    before = pids(one)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        os.kill(before[0], number)
    draw(one, 3)
    assert pids(one) == before
    assert not caplog.records


def test_workers_that_always_die_end_the_run_with_a_way_out(
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


def test_what_a_worker_refuses_is_refused_here(corpora, open_loader) -> None:
    one = open_loader(corpora.data(workers=1))
    (corpora.root / "beta/a.arrow").rename(corpora.root / "beta/gone")
    (corpora.root / "beta/b.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data\.sources\.beta\.paths: no file matches"):
        one.next_batch()


def test_closing_ends_the_processes(corpora, open_loader) -> None:
    one = open_loader(corpora.data(workers=3, prefetch=4))
    draw(one, 2)
    processes = pids(one)
    assert len(processes) == 3
    os.kill(processes[0], signal.SIGSTOP)
    one.close()
    assert not any(map(is_running, processes))


def test_more_workers_than_rows_are_not_started(corpora, open_loader) -> None:
    one = open_loader(corpora.data(workers=9), dp_rank=1, dp_world_size=2)
    draw(one, 1)
    assert len(pids(one)) == 2


@pytest.mark.parametrize("stop", [False, True])
def test_a_killed_trainer_leaves_no_process_and_no_memory(corpora, tmp_path, stop: bool) -> None:
    """A stopped worker does not see that its standard input closes."""
    program = f"""
import sys
from hlat.config.batch import BatchConfig
from hlat.config.data import DataConfig, SourceConfig
from hlat.config.phase import PhaseConfig, StageConfig
from hlat.data.data_loader import build_data_loader
data = DataConfig("x", {str(corpora.root)!r}, {{"alpha": SourceConfig(["alpha"])}}, tokenizer="embedded",
            eos_token="<|endoftext|>", heldout_documents=3, workers=2)
one = build_data_loader(data, PhaseConfig("p", [StageConfig("s")]), BatchConfig(4, 1, 32), 1)
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
    assert wait_until_gone(processes)
    if shared:
        assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.slow  # one or more whole processes
def test_files_that_come_while_a_run_reads_are_never_read_unawares(corpora, open_loader) -> None:
    """A worker opens the corpus when it is started and restarted."""
    whole = open_loader(corpora.data())
    one = open_loader(corpora.data(workers=2, prefetch=0))
    np.testing.assert_array_equal(draw(one, 3), draw(whole, 3))
    before = one.state_dict()
    extra = (corpora.root / "beta/a.arrow").read_bytes()
    (corpora.root / "beta/c.arrow").write_bytes(extra)
    os.kill(pids(one)[0], signal.SIGKILL)
    with pytest.raises(ConfigError, match=r"data\.sources\.beta: has changed since the run began"):
        one.next_batch()
    (corpora.root / "beta/c.arrow").unlink()
    assert one.state_dict() == before
    np.testing.assert_array_equal(draw(one, 3), draw(whole, 3))


def test_a_worker_is_of_this_hlat_whatever_lies_in_the_folder(
    corpora, open_loader, tmp_path, monkeypatch
) -> None:
    (tmp_path / "hlat").mkdir()
    (tmp_path / "hlat/__init__.py").write_text("raise ImportError('another hlat')")
    (tmp_path / "json.py").write_text("raise ImportError('another json')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the user's own to set
    assert open_loader(corpora.data(workers=1)).next_batch().tokens.shape == (4, 32)


def test_a_program_that_cannot_be_started_leaks_nothing(corpora, open_loader, monkeypatch) -> None:
    one = open_loader(corpora.data(workers=1))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerDiedError):
        one.next_batch()
    assert len(os.listdir("/proc/self/fd")) == before
