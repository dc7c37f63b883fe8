"""What supervisors of several nodes agree on, over a real store, each in a thread of its own."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from hlat.config.config_errors import ExitCode
from hlat.launch_environment import NodeInfo
from hlat.recovery import failure_coordinator
from hlat.recovery.failure_coordinator import Failure, FailureCoordinator

RAISED = Failure("rank 1 raised ConnectionError", trace="...", time=2.0)
KILLED = Failure("rank 0 was killed by SIGKILL", killed=True, time=3.0)
BAD = Failure("rank 1 exited with code 4", exit=ExitCode.UNHEALTHY_NODE, time=1.0)
MISTAKE = Failure("rank 0 raised", problems=("a", "b"), exit=ExitCode.CONFIGURATION, time=1.0)


@pytest.fixture
def members(monkeypatch):
    """Members of a council of three, by number of their nodes."""
    monkeypatch.setattr(failure_coordinator, "_REPORT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(failure_coordinator, "_ACKNOWLEDGE_TIMEOUT_S", 0.5)
    leader = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seconds = timedelta(seconds=30)

    def member(rank: int) -> FailureCoordinator:
        store = leader
        if rank:
            store = TCPStore("127.0.0.1", leader.port, is_master=False, timeout=seconds)
        made = FailureCoordinator(NodeInfo(rank, 3, "first", leader.port), f"n{rank}")
        made.attach_store(PrefixStore("1", store))
        return made

    return [member(rank) for rank in range(3)]


def agreed(members, failures, restart: bool):
    """What each of them hears; a member without an entry says nothing."""
    heard = {}

    def speak(rank: int) -> None:
        heard[rank] = members[rank].resolve_failure(failures[rank], lambda cause: restart)

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
    assert not any(member.has_failure() for member in members)
    assert agreed(members, failures, restart) == dict.fromkeys(range(3), (cause, restart))
    assert all(member.has_failure() for member in members)


def test_without_a_node_nothing_goes_on(members):
    heard = agreed(members, {0: None, 2: RAISED}, restart=True)
    assert heard[0] == heard[2]
    cause, restart = heard[0]
    assert cause.reason == "node n1 did not answer after rank 1 raised ConnectionError"
    assert not restart


def test_without_the_first_node_each_ends(members):
    heard = agreed(members, {1: None, 2: RAISED}, restart=True)
    assert heard[1] == (Failure("connection to the first node, first, lost"), False)
    assert heard[2] == (RAISED, False)


def test_a_single_node_decides_by_itself():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    coordinator = FailureCoordinator(NodeInfo(0, 1, "first", store.port), "n0")
    coordinator.attach_store(store)
    assert not coordinator.has_failure()
    for cause in (KILLED, MISTAKE):
        for restart in (True, False):
            decision = coordinator.resolve_failure(cause, lambda failure, restart=restart: restart)
            assert decision == (cause, restart)
