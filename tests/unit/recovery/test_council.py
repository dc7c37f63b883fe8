"""What supervisors of several nodes agree on, over a real store, each in a thread of its own."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from hlat.config.errors import Exit
from hlat.engine.processes import Node
from hlat.recovery import council
from hlat.recovery.council import Alone, Council, Failure

RAISED = Failure("rank 1 raised ConnectionError", trace="...", time=2.0)
KILLED = Failure("rank 0 was ended by SIGKILL", killed=True, time=3.0)
BAD = Failure("rank 1 exited with code 4", exit=Exit.UNHEALTHY_NODE, time=1.0)
MISTAKE = Failure("rank 0 raised", problems=("a", "b"), exit=Exit.CONFIGURATION, time=1.0)


@pytest.fixture
def members(monkeypatch):
    """Members of a council of three, by number of their nodes."""
    monkeypatch.setattr(council, "_SECONDS_TO_TELL", 3.0)
    monkeypatch.setattr(council, "_SECONDS_TO_HEAR", 1.0)
    leader = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seconds = timedelta(seconds=30)

    def member(rank: int) -> Council:
        store = leader
        if rank:
            store = TCPStore("127.0.0.1", leader.port, is_master=False, timeout=seconds)
        made = Council(Node(rank, 3, "first", leader.port), f"n{rank}")
        made.begin(PrefixStore("1", store))
        return made

    return [member(rank) for rank in range(3)]


def agreed(members, failures, restart: bool):
    """What each of them hears; a member without an entry says nothing."""
    heard = {}

    def speak(rank: int) -> None:
        heard[rank] = members[rank].agree(failures[rank], lambda cause: restart)

    threads = [threading.Thread(target=speak, args=(rank,)) for rank in failures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return heard


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ({0: RAISED, 1: None, 2: None}, RAISED),
        ({0: RAISED, 1: KILLED, 2: None}, KILLED),
        ({0: RAISED, 1: None, 2: BAD}, BAD),
        ({0: None, 1: MISTAKE, 2: RAISED}, MISTAKE),
    ],
)
def test_all_hear_the_cause_and_what_follows(members, failures, cause, restart):
    assert not any(member.troubled() for member in members)
    assert agreed(members, failures, restart) == dict.fromkeys(range(3), (cause, restart))
    assert all(member.troubled() for member in members)


def test_without_a_node_nothing_goes_on(members):
    heard = agreed(members, {0: None, 2: RAISED}, restart=True)
    assert heard[0] == heard[2]
    cause, restart = heard[0]
    assert cause.reason == "node n1 did not answer after rank 1 raised ConnectionError"
    assert not restart


def test_without_the_first_node_each_ends(members):
    heard = agreed(members, {1: None, 2: RAISED}, restart=True)
    assert heard[1] == (Failure("the first node, first, was lost"), False)
    assert heard[2] == (RAISED, False)


def test_a_node_alone_asks_nobody():
    assert not Alone().troubled()
    assert Alone().agree(KILLED, lambda cause: cause is KILLED) == (KILLED, True)
