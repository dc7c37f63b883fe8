"""Agreement between the supervisors of several nodes on a failure and its consequence.

When a process dies, the processes of all other nodes fail soon after it. Supervisors therefore
exchange their failures through the rendezvous store; the first node finds the root cause and
decides for all. A node that does not answer is lost.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hlat.config.config_errors import ExitCode
from hlat.distributed.rank_environment import NodeInfo

_FAILURE_KEY, _DECISION_KEY = "has_failure", "decision"
_REPORT_TIMEOUT_S = 20.0
"""Time for all nodes to report; each supervisor polls ten times a second."""
_ACKNOWLEDGE_TIMEOUT_S = 5.0
"""Time for all nodes to read the decision before the first supervisor exits with its store."""
_POLL_INTERVAL_S = 0.1
Store = Any
"""A torch.distributed.Store; this module is importable without torch."""


@dataclass(frozen=True)
class Failure:
    """Unplanned end of processes.

    Attributes:
        reason: Reason in one line.
        trace: Traceback of the first exception; empty without one.
        problems: Problems of the configuration, for which a restart is useless.
        exit: Exit code if the run is not restarted.
        killed: True if a signal ended the process; its peers raise an exception as a consequence.
        time: Unix time of the failure or of its detection.
    """

    reason: str
    trace: str = ""
    problems: tuple[str, ...] = ()
    exit: ExitCode = ExitCode.FAILED
    killed: bool = False
    time: float = 0.0


_UNREPORTED = Failure("an unreported failure")


class FailureCoordinator:
    """The supervisor of `node`, named `host`, among those of the nodes of a job."""

    def __init__(self, node: NodeInfo, host: str) -> None:
        self._node, self._host = node, host
        self._store: Store | None = None

    def attach_store(self, store: Store) -> None:
        """Use the store of the current start of the processes."""
        self._store = store
        store.set(f"host/{self._node.node_rank}", self._host)

    def has_failure(self) -> bool:
        """Return True if any node has reported a failure or the store is unreachable."""
        assert self._store is not None
        try:
            return bool(self._store.check([_FAILURE_KEY]))
        except RuntimeError:
            return True

    def resolve_failure(
        self, local_failure: Failure | None, may_restart: Callable[[Failure], bool]
    ) -> tuple[Failure, bool]:
        """Report this node's failure, if it has one; return the root cause and the decision.

        The decision is True if the run is restarted. `may_restart` is called on the first node.
        """
        assert self._store is not None
        rank, store = self._node.node_rank, self._store
        lost_store = Failure(f"connection to the first node, {self._node.host}, lost")
        try:
            store.set(_FAILURE_KEY, "")
            report = None if local_failure is None else asdict(local_failure)
            store.set(f"failure/{rank}", json.dumps(report))
            if rank == 0:
                cause, restart = self._decide(store, may_restart)
                store.set(_DECISION_KEY, json.dumps([asdict(cause), restart]))
            deadline = time.monotonic() + _REPORT_TIMEOUT_S + _ACKNOWLEDGE_TIMEOUT_S
            if not _wait_for_key(store, _DECISION_KEY, deadline):
                return local_failure or lost_store, False
            decided, restart = json.loads(store.get(_DECISION_KEY))
            store.set(f"acknowledged/{rank}", "")
        except RuntimeError:
            return local_failure or lost_store, False
        if rank == 0:
            self._find_missing_nodes(store, "acknowledged", _ACKNOWLEDGE_TIMEOUT_S)
        return _failure_from_json(decided), bool(restart)

    def _decide(self, store: Store, may_restart: Callable[[Failure], bool]) -> tuple[Failure, bool]:
        """Return the root cause and the decision; a lost node prevents a restart."""
        lost = self._find_missing_nodes(store, "failure", _REPORT_TIMEOUT_S)
        reports = [
            json.loads(store.get(f"failure/{rank}"))
            for rank in range(self._node.num_nodes)
            if rank not in lost
        ]
        failures = [_failure_from_json(report) for report in reports if report is not None]
        # A process that a signal ended makes its peers fail
        cause = min(failures, key=lambda one: (not one.killed, one.time), default=_UNREPORTED)
        if not lost:
            return cause, may_restart(cause)
        keys = {rank: f"host/{rank}" for rank in lost}
        hosts = [
            store.get(key).decode() if store.check([key]) else str(rank)
            for rank, key in keys.items()
        ]
        nodes = f"node{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}"
        reason = f"{nodes} did not answer after {cause.reason}"
        return replace(cause, reason=reason, trace=""), False

    def _find_missing_nodes(self, store: Store, prefix: str, timeout_s: float) -> list[int]:
        """Return the nodes that have not set `prefix/<rank>` within the timeout."""
        deadline, nodes = time.monotonic() + timeout_s, range(self._node.num_nodes)
        return [rank for rank in nodes if not _wait_for_key(store, f"{prefix}/{rank}", deadline)]


def _wait_for_key(store: Store, key: str, deadline: float) -> bool:
    """Poll until `key` is set or the deadline; `Store.wait` would log a long message."""
    while not (is_set := bool(store.check([key]))) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    return is_set


def _failure_from_json(fields: dict[str, Any]) -> Failure:
    parsed = {"problems": tuple(fields["problems"]), "exit": ExitCode(fields["exit"])}
    return Failure(**fields | parsed)
