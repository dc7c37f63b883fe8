"""Processes that stay for all distributed tests, and run on request what a test asks of them.

Starting eight processes that import torch takes ten times as long as most checks.
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


class Ranks:
    """Processes on this machine, of which each check makes a world."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
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
        """Whether nothing has broken them."""
        return bool(self._pipes)

    def run(self, size: int, check: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of a test module returns on each of the first ranks."""
        assert self.alive, "these were broken by an earlier check"
        meeting = LocalRendezvous("check")  # kept: a port that is free is anybody's a moment later
        port = meeting.next_rendezvous().bootstrap_store_info.master_port
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
                    kind, results[pipe] = "raised", "a rank has died; its last words are on stderr"
                if kind == "raised":
                    self.close()
                    raise RuntimeError(results[pipe])
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(f"{len(waiting)} ranks have not answered for {SECONDS} s")
        return [results[pipe] for pipe in self._pipes[:size]]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes = []


def _serve(rank: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
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
        if dist.is_initialized():  # a check that fails does not leave its world
            dist.destroy_process_group()
        gc.collect()  # each group has threads, which wake up a hundred times a second
