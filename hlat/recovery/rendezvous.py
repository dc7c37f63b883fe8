"""Rendezvous of the workers of one machine or of the nodes of a job, through a known store.

TorchElastic's dynamic rendezvous backends keep their state as a pickle in a store that listens on
every network interface, so any process that reaches the port could run code. Torch's static
rendezvous has no pickles, and the store of a single node listens on the loopback interface only.
"""

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch lists neither
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hlat.distributed.rank_environment import NodeInfo

_LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT = timedelta(seconds=60)
_RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Nodes that start together load their programs from one file system, at different speeds."""


class StoreRendezvous(StaticTCPRendezvous):
    """Static rendezvous on an existing store, with a new key prefix for each start of the workers.

    Attributes:
        node: This node; the first node hosts the store.
    """

    def __init__(self, node: NodeInfo, run_id: str, timeout: timedelta, **options: Any) -> None:
        super().__init__(node.host, node.port, node.node_rank, node.num_nodes, run_id, timeout=0)
        is_master = node.node_rank == 0
        self._server = TCPStore(
            node.host, node.port, None, is_master, timeout, wait_for_workers=False, **options
        )
        self.node, self._round = node, 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store under the prefix of the next start."""
        self._round += 1
        store = PrefixStore(f"{self.run_id}/{self._round}", self._server)
        info = RendezvousStoreInfo(self.node.host, self.node.port)
        return RendezvousInfo(store, self.node.node_rank, self.node.num_nodes, info)


class LocalRendezvous(StoreRendezvous):
    """Rendezvous of a single node, on a free port."""

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((_LOOPBACK, 0))
        node = NodeInfo(0, 1, _LOOPBACK, listener.getsockname()[1])
        super().__init__(node, run_id, _CONNECT_TIMEOUT, master_listen_fd=listener.detach())


class MultiNodeRendezvous(StoreRendezvous):
    """Rendezvous of the nodes of a job, on the first node at the port chosen by the launcher.

    Raises:
        torch.distributed.DistError: The first node is unreachable, or its port is in use.
    """

    def __init__(self, node: NodeInfo) -> None:
        super().__init__(node, "nodes", _RENDEZVOUS_TIMEOUT)
