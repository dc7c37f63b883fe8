"""Requests of all ranks to the store of a run at start-up, from threads of one process.

Each rank has a separate connection to the store. Its requests are those of init_process_group and
of the groups of its axes: gloo publishes an address (154 bytes, as counted with a store in Python)
and reads those of the ranks that it connects to in one request. The ranks do not connect to each
other.
"""

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from hlat.distributed.mesh_coordinates import ParallelDegrees, partition_ranks

_NUM_THREADS = 64
_ADDRESS = b"a" * 154
_TIMEOUT = timedelta(seconds=600)


def measure_rendezvous(degrees: ParallelDegrees) -> dict[str, Any]:
    """Connect all ranks to one store, wait for all, and exchange the addresses of the axes."""
    size = degrees.world_size
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False)
    clients: list[Any] = [None] * size

    def connect(rank: int) -> None:
        clients[rank] = TCPStore("127.0.0.1", server.port, None, False, _TIMEOUT)

    def join(rank: int) -> None:
        clients[rank].set(f"world/{rank}", _ADDRESS)
        clients[rank].add("joined", 1)

    def publish(rank: int) -> None:
        for axis, _ in _list_axes(rank, degrees):
            clients[rank].set(f"{axis}/{rank}", _ADDRESS)

    def read(rank: int) -> None:
        for axis, peers in _list_axes(rank, degrees):
            clients[rank].multi_get([f"{axis}/{peer}" for peer in peers])

    seconds = {}
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for name, phase in (
            ("connect", connect),
            ("join", join),
            ("publish", publish),
            ("read", read),
        ):
            start = time.perf_counter()
            list(pool.map(phase, range(size)))
            seconds[name] = round(time.perf_counter() - start, 2)
        assert server.add("joined", 0) == size
    full_mesh = _measure_full_mesh(clients[0], size)
    axes = _list_axes(0, degrees)
    return {
        "clients": size,
        "seconds": seconds | {"total": round(sum(seconds.values()), 2)},
        "addresses_read_per_rank": sum(len(peers) for _, peers in axes),
        "connections_per_rank": sum(len(peers) - 1 for _, peers in axes),
        "full_mesh_read_of_one_rank_s": full_mesh,
        "full_mesh_connections_per_rank": size - 1,
    }


def _measure_full_mesh(client: Any, size: int) -> float:
    """Return the seconds of one rank's request for the addresses of all ranks."""
    start = time.perf_counter()
    client.multi_get([f"world/{rank}" for rank in range(size)])
    return round(time.perf_counter() - start, 4)


def _list_axes(rank: int, degrees: ParallelDegrees) -> list[tuple[str, list[int]]]:
    """Return a name and the ranks of each group of a rank: three axes, twice."""
    groups = []
    for name in ("pp", "dp", "tp"):
        peers = next(ranks for ranks in partition_ranks(degrees, name) if rank in ranks)
        groups += [(f"{name}{copy}", peers) for copy in range(2)]
    return groups
