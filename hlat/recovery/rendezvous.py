"""Where the processes that supervisors start meet: on one machine, or on the nodes of a job.

TorchElastic's own meeting places keep their state as a pickle, which the supervisor reads several
times a second, in a store that listens on every network of the machine: whoever reached its port
could run code. A launcher has said beforehand who takes part, so here is but a store, from which
nothing is unpickled; that of a single node listens on this machine alone.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch lists neither
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from hlat.engine.processes import Node

_HOST = "127.0.0.1"
_SECONDS_TO_CONNECT = timedelta(seconds=60)
_SECONDS_TO_MEET = timedelta(minutes=10)
"""Nodes that start together read their programs from one file system, some far sooner."""


class StoreRendezvous(RendezvousHandler):
    """A store that is known beforehand, in which TorchElastic's agents number the processes."""

    def __init__(self, store: TCPStore, node: Node, run_id: str) -> None:
        """Meet in `store`, which the first node keeps."""
        self._store, self._node, self._run_id, self._round = store, node, run_id, 0

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes meet in this store too, rather than in one of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, under a prefix of its own for every start of the processes."""
        self._round += 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        place = RendezvousStoreInfo(self._node.host, self._node.port)
        return RendezvousInfo(store, self._node.rank, self._node.size, place)

    def get_backend(self) -> str:
        """Name of this kind."""
        return "local" if self._node.size == 1 else "nodes"

    def get_run_id(self) -> str:
        """Name of the run."""
        return self._run_id

    def is_closed(self) -> bool:
        """Never: the store ends with the process."""
        return False

    def set_closed(self) -> None:
        """Nothing waits for it."""

    def num_nodes_waiting(self) -> int:
        """None can come."""
        return 0

    def shutdown(self) -> bool:
        """Nothing is left to end."""
        return True


class LocalRendezvous(StoreRendezvous):
    """Lets TorchElastic's agent start and restart the processes of a single node."""

    def __init__(self, run_id: str) -> None:
        """Open the store, on a port that is free.

        Args:
            run_id: Name of the run among those of TorchElastic.
        """
        listening = socket.create_server((_HOST, 0))
        port: int = listening.getsockname()[1]
        store = TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_SECONDS_TO_CONNECT,
            master_listen_fd=listening.detach(),
        )
        super().__init__(store, Node(0, 1, _HOST, port), run_id)


class NodesRendezvous(StoreRendezvous):
    """Lets the agents on the nodes of a job start and restart the processes of all of them."""

    def __init__(self, node: Node, run_id: str) -> None:
        """Open the store on the first node, on the port that the launcher chose, or find it there.

        Args:
            node: Which of them this is.
            run_id: Name of the run among those of TorchElastic.

        Raises:
            torch.distributed.DistError: The first node cannot be reached, or its port is taken.
        """
        store = TCPStore(
            node.host,
            node.port,
            is_master=node.rank == 0,
            wait_for_workers=False,
            timeout=_SECONDS_TO_MEET,
        )
        super().__init__(store, node, run_id)
