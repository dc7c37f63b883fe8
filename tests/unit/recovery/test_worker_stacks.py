"""The stacks of all ranks of a node are in one file."""

import threading
from pathlib import Path

from hlat.recovery import worker_stacks
from hlat.recovery.worker_stacks import WorkerStacks


def test_collect_the_new_stacks_of_all_ranks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(worker_stacks, "_DUMP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(worker_stacks, "_POLL_INTERVAL_S", 0.01)
    files = [tmp_path / f"rank_{rank}.stacks" for rank in range(3)]
    files[0].write_text("earlier ")
    stacks = WorkerStacks(range(3), tmp_path, tmp_path / "logs/node_0.stacks")
    assert not stacks.has_new()
    with files[0].open("a") as file:
        file.write("stacks of 0")
    files[1].write_text("stacks of 1")
    assert stacks.has_new()
    stacks.collect()
    content = stacks.path.read_text()
    assert content == "rank 0:\nstacks of 0\nrank 1:\nstacks of 1\nrank 2:\nno stacks\n"
    assert not stacks.has_new()


def test_wait_until_all_stacks_are_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(worker_stacks, "_POLL_INTERVAL_S", 0.01)
    stacks = WorkerStacks(range(1), tmp_path, tmp_path / "node_0.stacks")
    timer = threading.Timer(0.05, (tmp_path / "rank_0.stacks").write_text, ["late"])
    timer.start()
    stacks.collect()
    assert stacks.path.read_text() == "rank 0:\nlate\n"


def test_a_pause_of_a_worker_does_not_end_its_stacks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(worker_stacks, "_POLL_INTERVAL_S", 0.05)
    stacks = WorkerStacks(range(1), tmp_path, tmp_path / "node_0.stacks")
    file = (tmp_path / "rank_0.stacks").open("a", buffering=1)
    print("first thread", file=file)
    timer = threading.Timer(0.15, print, ["main thread"], {"file": file})
    timer.start()
    stacks.collect()
    assert stacks.path.read_text() == "rank 0:\nfirst thread\nmain thread\n\n"
    file.close()
