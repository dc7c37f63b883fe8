"""Agreement of supervisors of several nodes through a real store, each in a separate thread."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from hlat.config.config_errors import ExitCode
from hlat.distributed.rank_environment import NodeInfo
from hlat.recovery import failure_coordinator
from hlat.recovery.failure_coordinator import Failure, FailureCoordinator

RAISED = Failure("rank 1 raised ConnectionError", trace="...", time=2.0)
KILLED = Failure("rank 0 was killed by SIGKILL", killed=True, time=3.0)
BAD = Failure("rank 1 exited with code 4", exit=ExitCode.UNHEALTHY_NODE, time=1.0)
MISTAKE = Failure("rank 0 raised", problems=("a", "b"), exit=ExitCode.CONFIGURATION, time=1.0)


@pytest.fixture
def coordinators(monkeypatch):
    """Create the coordinators of three nodes."""
    monkeypatch.setattr(failure_coordinator, "_REPORT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(failure_coordinator, "_ACKNOWLEDGE_TIMEOUT_S", 0.5)
    leader = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seconds = timedelta(seconds=30)

    def coordinator(rank: int) -> FailureCoordinator:
        store = leader
        if rank:
            store = TCPStore("127.0.0.1", leader.port, is_master=False, timeout=seconds)
        made = FailureCoordinator(NodeInfo(rank, 3, "first", leader.port), f"n{rank}")
        made.attach_store(PrefixStore("1", store))
        return made

    return [coordinator(rank) for rank in range(3)]


def resolve_failures(coordinators, failures, restart: bool):
    """Return the decisions of all nodes; a node without an entry does not respond."""
    decisions = {}

    def resolve(rank: int) -> None:
        decisions[rank] = coordinators[rank].resolve_failure(failures[rank], lambda cause: restart)

    threads = [threading.Thread(target=resolve, args=(rank,)) for rank in failures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return decisions


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
def test_all_nodes_get_the_cause_and_the_decision(coordinators, failures, cause, restart):
    assert not any(coordinator.has_failure() for coordinator in coordinators)
    assert resolve_failures(coordinators, failures, restart) == dict.fromkeys(
        range(3), (cause, restart)
    )
    assert all(coordinator.has_failure() for coordinator in coordinators)


@pytest.mark.slow
def test_a_missing_node_prevents_a_restart(coordinators):
    decisions = resolve_failures(coordinators, {0: None, 2: RAISED}, restart=True)
    assert decisions[0] == decisions[2]
    cause, restart = decisions[0]
    assert cause.reason == "node n1 did not answer after rank 1 raised ConnectionError"
    assert not restart


@pytest.mark.slow
def test_nodes_exit_without_the_first_node(coordinators):
    decisions = resolve_failures(coordinators, {1: None, 2: RAISED}, restart=True)
    assert decisions[1] == (Failure("connection to the first node, first, lost"), False)
    assert decisions[2] == (RAISED, False)


def test_a_single_node_decides_by_itself():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    coordinator = FailureCoordinator(NodeInfo(0, 1, "first", store.port), "n0")
    coordinator.attach_store(store)
    assert not coordinator.has_failure()
    for cause in (KILLED, MISTAKE):
        for restart in (True, False):
            decision = coordinator.resolve_failure(cause, lambda failure, restart=restart: restart)
            assert decision == (cause, restart)
