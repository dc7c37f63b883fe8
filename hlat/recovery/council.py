"""How the supervisors of several nodes agree on what a failure was, and what becomes of the run.

When a process dies, those of all nodes fail soon after it, for want of it. So supervisors tell each
other what they saw, in the store in which they met; the first one finds the cause, and decides for
all. Who does not answer was lost together with its node.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from hlat.config.errors import Exit
from hlat.engine.processes import Node

_TROUBLE, _VERDICT = "trouble", "verdict"
_SECONDS_TO_TELL = 20.0
"""Given to all nodes together for saying what they saw; each looks ten times a second."""
_SECONDS_TO_HEAR = 5.0
"""Given to them for reading what was decided, before the store ends with the first supervisor."""
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Failure:
    """Why processes ended without having agreed to.

    Attributes:
        reason: In one line.
        trace: Of the exception that was raised first; empty if none was.
        problems: Of a mistake in the configuration, which no restart mends.
        exit: What to exit with, unless the run goes on.
        killed: Whether a signal ended the process; its peers raise an exception for want of it.
        time: When it happened, or was seen.
    """

    reason: str
    trace: str = ""
    problems: tuple[str, ...] = ()
    exit: Exit = Exit.FAILED
    killed: bool = False
    time: float = 0.0


class Store(Protocol):
    """What is used of torch.distributed.Store; it raises RuntimeError when it is gone."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""


Decide = Callable[[Failure], bool]
"""Whether processes may be started again after a failure."""


class Council:
    """The supervisors of a job's nodes, of which this is one."""

    def __init__(self, node: Node, host: str) -> None:
        """Take part as the supervisor of `node`, whose name is `host`."""
        self._node, self._host = node, host
        self._store: Store | None = None

    def begin(self, store: Store) -> None:
        """Begin anew in the store of this start of the processes."""
        if store is not self._store:
            self._store = store
            store.set(f"host/{self._node.rank}", self._host)

    def troubled(self) -> bool:
        """Whether a node has seen a failure; also if the first one does not answer any more."""
        assert self._store is not None
        try:
            return self._store.check([_TROUBLE])
        except RuntimeError:
            return True

    def agree(self, own: Failure | None, decide: Decide) -> tuple[Failure, bool]:
        """Tell the others, and return what the failure was and whether the run goes on.

        Args:
            own: What happened on this node; None: nothing but what the others tell.
            decide: Called on the first node.
        """
        assert self._store is not None
        rank, store = self._node.rank, self._store
        try:
            store.set(_TROUBLE, "")
            store.set(f"failure/{rank}", json.dumps(None if own is None else asdict(own)))
            if rank == 0:
                cause, restart = self._judge(store, decide)
                store.set(_VERDICT, json.dumps([asdict(cause), restart]))
            if not _appears(
                store, _VERDICT, time.monotonic() + _SECONDS_TO_TELL + _SECONDS_TO_HEAR
            ):
                return self._without_first(own), False
            told, restart = json.loads(store.get(_VERDICT))
            store.set(f"heard/{rank}", "")
        except RuntimeError:
            return self._without_first(own), False
        if rank == 0:
            self._missing(store, "heard", _SECONDS_TO_HEAR)
        return _failure(told), bool(restart)

    def _judge(self, store: Store, decide: Decide) -> tuple[Failure, bool]:
        """The cause of it all, and whether the run goes on; not without a node."""
        lost = self._missing(store, "failure", _SECONDS_TO_TELL)
        told = [
            json.loads(store.get(f"failure/{rank}"))
            for rank in range(self._node.size)
            if rank not in lost
        ]
        seen = [_failure(one) for one in told if one is not None]
        cause = first(seen) if seen else Failure("a call for help")
        if not lost:
            return cause, decide(cause)
        keys = {rank: f"host/{rank}" for rank in lost}
        names = [store.get(k).decode() if store.check([k]) else str(r) for r, k in keys.items()]
        nodes = f"node{'s' if len(names) > 1 else ''} {', '.join(names)}"
        reason = f"{nodes} did not answer after {cause.reason}"
        return replace(cause, reason=reason, trace=""), False

    def _missing(self, store: Store, what: str, seconds: float) -> list[int]:
        """The nodes that have not said something by then."""
        deadline = time.monotonic() + seconds
        nodes = range(self._node.size)
        return [rank for rank in nodes if not _appears(store, f"{what}/{rank}", deadline)]

    def _without_first(self, own: Failure | None) -> Failure:
        return own or Failure(f"the first node, {self._node.host}, was lost")


class Alone:
    """The same of a single node, which has nobody to ask."""

    def begin(self, store: Store) -> None:
        """Nothing is to be told."""

    def troubled(self) -> bool:
        """Never but by what it sees itself."""
        return False

    def agree(self, own: Failure | None, decide: Decide) -> tuple[Failure, bool]:
        """What this node saw, and what it decides."""
        assert own is not None
        return own, decide(own)


def first(failures: Sequence[Failure]) -> Failure:
    """The one that brought about the others: a process that was killed, else the earliest."""
    return min(failures, key=lambda failure: (not failure.killed, failure.time))


def _appears(store: Store, key: str, deadline: float) -> bool:
    """Whether a key is there by then; torch's own waiting tells users of a timeout at length."""
    while not (there := store.check([key])) and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return there


def _failure(fields: dict[str, Any]) -> Failure:
    """The one of which `asdict` made this."""
    known = {"problems": tuple(fields["problems"]), "exit": Exit(fields["exit"])}
    return Failure(**fields | known)
