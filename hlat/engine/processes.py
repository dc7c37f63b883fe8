"""The processes of a run as each of them sees it: its place among them, and who started it.

Under torchrun or Slurm a process finds its place in its environment. One that hlat's supervisor
started leaves word there of how it ends, and until when it will be heard of again. In a job of
hlat's launchers, one process a node is told where the others are, and becomes the supervisor there.
"""

import ctypes
import json
import mmap
import os
import re
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError, Exit
from hlat.config.run import Config

RECORDS = "HLAT_RECORDS"
"""Set in processes that hlat started: the folder where they leave what they raise."""
PARENT = "HLAT_PARENT"
"""Set in them as well: the number of the process that started them."""
NODES, NODE, MEETING = "HLAT_NODES", "HLAT_NODE", "HLAT_MEETING"
"""Set by launchers in the one process that they start on each node: how many nodes there are, which
of them this is (left out under Slurm, which tells), and host:port on the first."""
STOP = "HLAT_STOP"
"""Set by launchers that cannot signal all nodes: a file whose being there asks to save and end."""
_STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
"""The variables that tell rank, size and local rank, by who sets them."""
_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""
_DEADLINE = struct.Struct("d")


@dataclass(frozen=True)
class Place:
    """Where a process stands among those that were started together.

    Attributes:
        rank: Among all of them.
        size: How many there are.
        local_rank: Among those of its node.
        starter: Who started them, for messages.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    starter: str = "nobody"


@dataclass(frozen=True)
class Node:
    """Where a node stands among those of a job.

    Attributes:
        rank: Among all of them.
        size: How many there are.
        host: Name of the first of them.
        port: Where its supervisor listens to the others.
    """

    rank: int
    size: int
    host: str
    port: int


def node(environment: Mapping[str, str] = os.environ) -> Node | None:
    """Read which node of a job this process is to supervise; None: no launcher started it."""
    if MEETING not in environment or RECORDS in environment:
        return None
    host, _, port = environment[MEETING].rpartition(":")
    rank = environment[NODE] if NODE in environment else environment["SLURM_NODEID"]
    return Node(int(rank), int(environment[NODES]), host, int(port))


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Read the place of this process from what torchrun or Slurm's srun tell."""
    for starter, names in _STARTERS.items():
        if all(name in environment for name in names):
            rank, size, local_rank = (int(environment[name]) for name in names)
            return Place(rank, size, local_rank, starter)
    return Place()


def rendezvous(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that torch.distributed meets by, where Slurm has set none.

    The first host of the job step leads; the port follows from the job, so that two jobs on one
    node do not meet.
    """
    if "MASTER_ADDR" in environment or "SLURM_STEP_NODELIST" not in environment:
        return {}
    job = int(environment.get("SLURM_JOB_ID", 0))
    return {
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(20000 + job % 10000),
    }


def first_host(hosts: str) -> str:
    """The first of Slurm's list: trn-[003-007,9],other is trn-003."""
    match = re.fullmatch(r"([^\[,]*)(?:\[(\w+)[^\]]*\](\S*?))?(?:,.*)?", hosts)
    assert match is not None, hosts
    return "".join(part or "" for part in match.groups())


def must_start(config: Config) -> bool:
    """Whether this process is to start and watch those that train, rather than train.

    Raises:
        ConfigError: Neither: as many as there are do not fit the layout.
    """
    if (here := node()) is not None:
        if here.size != config.hardware.nodes:
            raise ConfigError(
                f"hardware.nodes={config.hardware.nodes}, and {NODES}={here.size} were given to "
                "the job; start it on as many"
            )
        return True
    found, need = place(), config.num_processes
    started = found != Place()
    if found.size == need and (started or config.recovery.max_restarts == 0):
        return False
    layout = config.parallelism
    wanted = f"parallelism.tp={layout.tp} x pp={layout.pp} on hardware={config.hardware.name}"
    if found.size > 1:
        raise ConfigError(
            f"{wanted} needs {need} processes, {found.starter} started {found.size}; start {need}, "
            "or set parallelism and hardware.nodes x processes_per_node to match"
        )
    if config.hardware.nodes > 1:
        raise ConfigError(
            f"{wanted} needs {need} processes on hardware.nodes={config.hardware.nodes}, and this "
            "is one process on one node; add hydra/launcher=slurm, or start all of them with "
            "torchrun or srun"
        )
    return True


def recorded(run: Callable[[], Exit]) -> Exit:
    """Run, and leave word of how it ended to the process that started this one, if hlat did.

    TorchElastic ends all processes as soon as one of them exits with anything but 0. So an end that
    all have agreed on exits with 0, and says in its record what the exit code is to be.
    """
    if RECORDS not in os.environ:
        return run()
    _end_with_parent()
    path = Path(os.environ[RECORDS]) / f"{place().rank}.json"
    try:
        _leave(path, {"exit": run()})
    except Exception as error:
        problems = error.problems if isinstance(error, ConfigError) else None
        record = {"time": time.time(), "problems": problems, "trace": traceback.format_exc()}
        _leave(path, record)
        sys.stdout.flush()
        # Other threads, of collectives that wait for lost peers, would keep it alive
        os._exit(Exit.FAILED if problems is None else Exit.CONFIGURATION)
    return Exit.FINISHED


def _leave(path: Path, record: dict[str, Any]) -> None:
    """Write a record at once: whoever reads it may be ended any time, and so may this process."""
    written = path.with_suffix(".part")
    written.write_text(json.dumps(record))
    written.replace(path)


def _end_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it is gone, however it went.

    If it went before it could be asked, this process is an orphan already, and ends now: it would
    hold the run's folder and wait for its peers for ever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        os._exit(Exit.FAILED)


class Pulse:
    """The time until which a process may be silent: it writes it, and the supervisor reads it.

    It is a number in memory that both map, by the clock that counts since the machine was started.
    """

    def __init__(self, path: Path) -> None:
        """Map the number; 0, for no limit, where there is none yet."""
        with open(path, "a+b") as file:
            if file.tell() < _DEADLINE.size:
                file.write(bytes(_DEADLINE.size))
                file.flush()
            self._memory = mmap.mmap(file.fileno(), _DEADLINE.size)

    def expect(self, seconds: float | None) -> None:
        """Promise a sign of life within some seconds; None: none at all."""
        deadline = 0.0 if seconds is None else time.monotonic() + seconds
        self._memory[:] = _DEADLINE.pack(deadline)

    def late(self) -> bool:
        """Whether that time is over."""
        deadline: float = _DEADLINE.unpack(self._memory[:])[0]
        return 0 < deadline < time.monotonic()


def pulse() -> Pulse | None:
    """That of this process; None if no supervisor of hlat started it."""
    folder = os.environ.get(RECORDS)
    return None if folder is None else Pulse(pulse_file(Path(folder), place().rank))


def pulse_file(records: Path, rank: int) -> Path:
    """Where the pulse of a process lies."""
    return records / f"{rank}.pulse"
