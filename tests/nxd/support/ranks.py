"""New processes that run one function each, with NxD on a CPU.

NxD reads variables during its import, and its groups exist until the process ends, so processes are
not reused. Only the server from which they are forked is: it has imported NxD without starting it.
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
"""Modes of NxD on a CPU; see tests/nxd/support/cpu.py."""
SECONDS = 300
"""Timeout without an answer and without CPU use: ranks on a loaded machine are slow."""
_CHECK_INTERVAL_S = 5.0
_MIN_CORES = 0.01
"""Minimum average number of cores that all ranks use together, unless they are deadlocked."""
MAX_OUTPUT_CHARACTERS = 3000
"""Characters of each rank's output in the message of a failure."""


def require_nxd() -> None:
    """Skip the calling test module if NxD is not importable."""
    if find_spec("neuronx_distributed") is None:
        reason = "neuronx_distributed is not importable: make test-nxd NXD_SOURCE=<checkout>"
        pytest.skip(reason, allow_module_level=True)


class RankError(RuntimeError):
    """Error of a rank that raised, died or did not answer, with the last output of all ranks."""


def run(
    size: int,
    function: str,
    *arguments: Any,
    mode: str = "gloo",
    seconds: float = SECONDS,
    **variables: str,
) -> list[Any]:
    """Run a function on `size` ranks and return the results in the order of ranks.

    Args:
        size: Number of processes.
        function: Module in tests/nxd/on_ranks and name, such as "layers.column".
        arguments: Arguments of the function, on every rank.
        mode: One of MODES, or "graphs".
        seconds: Timeout without CPU use, after which all ranks are killed.
        variables: Environment variables in addition to those of torchrun.

    Raises:
        RankError: A rank did not return.
    """
    rendezvous = LocalRendezvous(function)  # the port is bound until the object is deleted
    port = rendezvous.next_rendezvous().bootstrap_store_info.master_port
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
            outputs = [f"rank {i}: {_end(log)}" for i, log in enumerate(logs)]
            raise RankError("\n\n".join([f"{function}: {error}", *outputs])) from None
        finally:
            for _, process in started:
                process.kill()
                process.join()


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets on one machine."""
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
    """Return the CPU time of a process and its threads; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(log: Path) -> str:
    """Return the last output of a rank."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return text[-MAX_OUTPUT_CHARACTERS:] or "(silent)"


def _serve(
    pipe: Connection, variables: dict[str, str], log: Path, call: bytes, dump_after_s: float
) -> None:
    """Run the function in the new process; write output to the log and the result to the pipe."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.dump_traceback_later(dump_after_s, repeat=True)
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
    os._exit(code)  # skips torch_xla's exit handler, which waits for devices
