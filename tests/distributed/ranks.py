"""Rank processes that run functions of distributed tests.

They are forked from a server process that has imported torch and hlat, because these imports take
ten times as long as most checks.
"""

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from hlat.recovery.rendezvous import LocalRendezvous

SECONDS = 300
PRELOADED = ["tests.distributed.checks", "tests.distributed.mutants", "tests.distributed.faults"]
"""Modules that the server process imports."""


class Ranks:
    """Processes on this machine that form a new process group for each function."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()  # so that ours ends with the process
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        """Return False after an error in a rank."""
        return bool(self._pipes)

    def run(self, size: int, check: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of a function of a test module on the first ranks."""
        assert self.alive, "an earlier check failed on these ranks"
        rendezvous = LocalRendezvous("check")  # the port is bound until the object is deleted
        port = rendezvous.next_rendezvous().bootstrap_store_info.master_port
        for pipe in self._pipes[:size]:
            pipe.send((size, port, check, arguments))
        results: dict[Connection, Any] = {}
        deadline = time.monotonic() + SECONDS
        while len(results) < size:
            waiting = [pipe for pipe in self._pipes[:size] if pipe not in results]
            for pipe in wait(waiting, max(0.0, deadline - time.monotonic())):
                try:
                    kind, results[pipe] = pipe.recv()
                except EOFError:
                    kind, results[pipe] = "raised", "a rank has ended; see stderr"
                if kind == "raised":
                    self.close()
                    raise RuntimeError(results[pipe])
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(f"{len(waiting)} ranks have not returned after {SECONDS} s")
        return [results[pipe] for pipe in self._pipes[:size]]

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes = []


def _serve(rank: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # a collection would visit the objects of the server process, and copy their pages
    while True:
        size, port, check, arguments = pipe.recv()
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
        }
        try:
            pipe.send(("returned", check(*arguments)))
        except Exception:
            pipe.send(("raised", f"rank {rank}:\n{traceback.format_exc()}"))
        if dist.is_initialized():  # also after an error
            dist.destroy_process_group()
        gc.collect()  # threads of a group wake up a hundred times a second
