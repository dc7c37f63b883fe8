"""Where the processes that one process starts on its own machine meet.

TorchElastic's own meeting places keep their state as a pickle, which the supervisor reads several
times a second, in a store that listens on every network of the machine: whoever reached its port
could run code. One process that starts all others has nothing to agree on with anybody, so here is
but a store, which listens on this machine alone and from which nothing is unpickled.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch lists neither
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

_HOST = "127.0.0.1"
_SECONDS_TO_CONNECT = timedelta(seconds=60)


class LocalRendezvous(RendezvousHandler):
    """Lets TorchElastic's agent start and restart the processes of a single node."""

    def __init__(self, run_id: str) -> None:
        """Open the store, on a port that is free.

        Args:
            run_id: Name of the run among those of TorchElastic.
        """
        listening = socket.create_server((_HOST, 0))
        self._port: int = listening.getsockname()[1]
        self._store = TCPStore(
            _HOST,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=_SECONDS_TO_CONNECT,
            master_listen_fd=listening.detach(),
        )
        self._run_id, self._round = run_id, 0

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes meet in this store too, rather than in one of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, under a prefix of its own for every start of the processes."""
        self._round += 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, self._port))

    def get_backend(self) -> str:
        """Name of this kind."""
        return "local"

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
