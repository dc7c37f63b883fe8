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
"""Without an answer and without work: ranks on a loaded machine are slow, but compute."""
_CHECK_INTERVAL_S = 5.0
_MIN_CORES = 0.01
"""Cores that ranks use together at least, on average, unless they wait for each other forever."""
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
        seconds: Without work, after which all are ended.
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
            pipes, processes = zip(*started, strict=True)
            return _results([*pipes], [process.pid for process in processes], seconds)
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


def _results(pipes: list[Connection], pids: list[int], seconds: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    used = dict.fromkeys(pids, 0.0)
    since, worked = time.monotonic(), 0.0
    while len(results) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in results]
        ready = wait(waiting, min(_CHECK_INTERVAL_S, seconds))
        used = {pid: max(before, _cpu_seconds(pid)) for pid, before in used.items()}
        if ready or sum(used.values()) - worked > _MIN_CORES * seconds:
            since, worked = time.monotonic(), sum(used.values())
        elif time.monotonic() - since > seconds:
            silent = [pipes.index(pipe) for pipe in waiting]
            raise RankError(f"ranks {silent} have not answered in time")
        for pipe in ready:
            try:
                results[pipe] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {pipes.index(pipe)} has failed") from None
    return [results[pipe] for pipe in pipes]


def _cpu_seconds(pid: int) -> float:
    """Of a process and its threads; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    faulthandler.dump_traceback_later(patience, repeat=True)
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
