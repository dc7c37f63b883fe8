"""The notice of a start names the call of each rank."""

import faulthandler
import threading
from pathlib import Path

from hlat.distributed import object_group
from hlat.distributed.object_group import SingleRankGroup
from hlat.recovery import start_notice
from hlat.recovery.start_notice import StartNotice, find_call
from hlat.recovery.worker_stacks import WorkerStacks


def test_find_the_call_of_the_main_thread(tmp_path: Path) -> None:
    def dump_stacks() -> None:
        with (tmp_path / "stacks").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    object_group.run_on_all(SingleRankGroup(), dump_stacks)
    done.set()
    other.join()
    stacks = (tmp_path / "stacks").read_text()
    assert stacks.count("most recent call first") >= 2
    assert "(hlat/distributed/object_group.py, line " in find_call(stacks)
    assert find_call("no stacks") == "no call of hlat"


def test_a_notice_is_due_after_two_four_and_eight_minutes(monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(start_notice.time, "monotonic", lambda: now[0])
    notice = StartNotice()
    due = []
    for seconds in range(0, 1000, 10):
        now[0] = 1000.0 + seconds
        if notice.is_due():
            due.append(seconds)
    assert due == [120, 240, 480, 960]
    notice.restart()
    assert not notice.is_due()


def test_the_message_groups_the_ranks_by_their_call(monkeypatch) -> None:
    monkeypatch.setattr(start_notice, "find_call", lambda stacks: stacks)
    calls = dict.fromkeys(range(12), "read (a.py, line 1)") | {12: "wait (b.py, line 2)"}
    message = StartNotice().format_message(calls, Path("logs/node_0.stacks"))
    assert message == (
        "hlat: the start is not complete after 0 s (compilation may take as long); rank 0, 1, 2, 3, "
        "4, 5, 6, 7 and 4 more: read (a.py, line 1); rank 12: wait (b.py, line 2); stacks are in "
        "logs/node_0.stacks"
    )


def test_stacks_of_unregistered_workers_are_not_requested(tmp_path: Path) -> None:
    stacks = WorkerStacks(range(2), tmp_path, tmp_path / "collected")
    (tmp_path / "rank_0.stacks").touch()
    assert not stacks.are_enabled
    (tmp_path / "rank_1.stacks").touch()
    assert stacks.are_enabled
    stacks.remove()
    assert not stacks.are_enabled
