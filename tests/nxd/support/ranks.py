"""Fresh processes that NxD believes to be Trainium's, each running one function.

What NxD does depends on variables that it reads while it is imported, and its groups live as long as
the process, so nothing is used twice but the server that the processes are forked from, which has
imported NxD and started nothing.
"""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from hlat.recovery.rendezvous import LocalRendezvous

MODES = ("gloo", "xla")
"""Ways of running NxD on a CPU; tests/nxd/support/cpu.py tells them apart."""
SECONDS = 300
LAST_WORDS = 3000
"""Characters of each rank's output in the message of a failure."""


def require_nxd() -> None:
    """Skip the test module that calls this where there is no NxD."""
    if find_spec("neuronx_distributed") is None:
        reason = "neuronx_distributed is not importable: make test-nxd NXD_SOURCE=<checkout>"
        pytest.skip(reason, allow_module_level=True)


class RankError(RuntimeError):
    """A rank raised, died or did not answer; the message has the last words of all."""


def run(
    size: int,
    function: str,
    *arguments: Any,
    mode: str = "gloo",
    seconds: float = SECONDS,
    **variables: str,
) -> list[Any]:
    """What a function returns on each of `size` ranks, in their order.

    Args:
        size: Number of processes.
        function: Module in tests/nxd/on_ranks and name, such as "layers.column".
        arguments: Of the function, on every rank.
        mode: One of MODES, or "graphs".
        seconds: After which all are ended.
        variables: Of the environment, beside torchrun's.

    Raises:
        RankError: Not all ranks have returned.
    """
    meeting = LocalRendezvous(function)  # kept: a port that is free is anybody's a moment later
    port = meeting.next_rendezvous().bootstrap_store_info.master_port
    call = pickle.dumps((mode, function, arguments))
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank_{rank}.log" for rank in range(size)]
        started = [
            _start(_environment(rank, size, port) | variables, log, call, seconds)
            for rank, log in enumerate(logs)
        ]
        try:
            return _results([pipe for pipe, _ in started], time.monotonic() + seconds)
        except RankError as error:
            words = [f"rank {i}: {_end(log)}" for i, log in enumerate(logs)]
            raise RankError("\n\n".join([f"{function}: {error}", *words])) from None
        finally:
            for _, process in started:
                process.kill()
                process.join()


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun would set, on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def _start(
    variables: dict[str, str], log: Path, call: bytes, seconds: float
) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.nxd.support.preload", __name__])
    ours, theirs = context.Pipe(duplex=False)
    arguments = (theirs, variables, log, call, 0.8 * seconds)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()  # so that ours ends with the process
    return ours, process


def _results(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [pipes.index(pipe) for pipe in waiting]
            raise RankError(f"ranks {silent} have not answered in time")
        for pipe in ready:
            try:
                results[pipe] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {pipes.index(pipe)} has failed") from None
    return [results[pipe] for pipe in pipes]


def _end(log: Path) -> str:
    """The last of what a rank has said."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return text[-LAST_WORDS:] or "(silent)"


def _serve(
    pipe: Connection, variables: dict[str, str], log: Path, call: bytes, patience: float
) -> None:
    """In the new process: what it says goes to the log, what it returns to the pipe."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.dump_traceback_later(patience)
    os.environ |= variables
    code = 1
    try:
        mode, function, arguments = pickle.loads(call)
        importlib.import_module("tests.nxd.support.cpu").install(mode)
        module, _, name = function.rpartition(".")
        called = getattr(importlib.import_module(f"tests.nxd.on_ranks.{module}"), name)
        pipe.send_bytes(pickle.dumps(called(*arguments)))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # past torch_xla's farewell, which waits for devices
