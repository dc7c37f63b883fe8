"""The processes of a run: those that somebody started, or those that this one starts.

Under torchrun or Slurm a process finds its place in its environment. Alone on a machine, it starts
as many as the layout asks for through TorchElastic, shows the first one's console and what the
others have to complain of, and ends all of them when one fails.
"""

import ctypes
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hlat.config.errors import ConfigError, Exit
from hlat.config.run import Config

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_RECORDS = "HLAT_RECORDS"
"""Set in processes that hlat started: the folder where they leave what they raise."""
_STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
"""The variables that tell rank, size and local rank, by who sets them."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""
_SECONDS_TO_END = 5
"""Given to the others when one has failed; what can be saved was saved before."""


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
    """Whether this process is to start those that train, rather than train.

    Raises:
        ConfigError: Neither: as many as there are do not fit the layout.
    """
    found, need = place(), config.num_processes
    if found.size == need:
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
            "is one process on one node; start all of them with torchrun or srun"
        )
    return True


def start(config: Config, command: list[str]) -> Exit:
    """Start the processes of a run on this machine, and wait for them; return the exit code.

    A signal goes on to all of them, and they decide together what becomes of it.

    Args:
        config: The run.
        command: What each of them runs.

    Raises:
        ConfigError: One of them raised it.
    """
    from hlat.tracking import run_folder

    with run_folder.claimed(config.run) as folder:
        logs = folder / "logs"
    threads = max(1, (os.cpu_count() or 1) // config.num_processes)
    with tempfile.TemporaryDirectory(prefix="hlat-") as records:
        variables = {
            _RECORDS: records,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # the others are ours
        }
        with _environment(variables):
            agent = _agent(command, config.num_processes, logs)
            with _forwarding(agent):
                result = agent.run()
        if result.is_failed():
            return _tell(result.failures, Path(records))
        return Exit(json.loads((Path(records) / "0.json").read_text())["exit"])


def recorded(run: Callable[[], Exit]) -> Exit:
    """Run, and leave word of how it ended to the process that started this one, if hlat did.

    TorchElastic ends all processes as soon as one of them exits with anything but 0. So an end that
    all have agreed on exits with 0, and says in its record what the exit code is to be.
    """
    if _RECORDS not in os.environ:
        return run()
    _end_with_parent()
    path = Path(os.environ[_RECORDS]) / f"{place().rank}.json"
    try:
        path.write_text(json.dumps({"exit": run()}))
    except Exception as error:
        problems = error.problems if isinstance(error, ConfigError) else None
        record = {"time": time.time(), "problems": problems, "trace": traceback.format_exc()}
        path.write_text(json.dumps(record))
        sys.stdout.flush()
        # Other threads, of collectives that wait for lost peers, would keep it alive
        os._exit(Exit.FAILED if problems is None else Exit.CONFIGURATION)
    return Exit.FINISHED


def _end_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _tell(failures: "dict[int, ProcessFailure]", records: Path) -> Exit:
    """Say what went wrong first, unless its process has said so; return the exit code."""
    for number, failure in failures.items():
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"hlat: the process of rank {number} was ended by {name}", file=sys.stderr)
            return Exit.FAILED
    told = [(json.loads(path.read_text()), path.stem) for path in records.glob("*.json")]
    raised = [(record, rank) for record, rank in told if "trace" in record]
    if raised:
        first, rank = min(raised, key=lambda pair: pair[0]["time"])
        if first["problems"] is not None:
            raise ConfigError(*first["problems"])
        print(f"hlat: rank {rank} failed:\n{first['trace']}", file=sys.stderr)
        return Exit.FAILED
    code = min(failure.exitcode for failure in failures.values())
    return Exit(code) if code in [*Exit] else Exit.FAILED


def _agent(command: list[str], need: int, logs: Path) -> "LocalElasticAgent":
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import LogsDest
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    class Logs(DefaultLogsSpecs):
        """The first rank on the console, the others' stderr there as well, and beside the run."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            destination = LogsDest()
            for rank in envs:
                log = logs / f"rank_{rank}.log"
                _put_aside(log)
                destination.stdouts[rank] = os.devnull if rank else ""
                destination.stderrs[rank] = str(log) if rank else ""
                if rank:
                    destination.tee_stderrs[rank] = str(log)
                destination.error_files[rank] = os.devnull
            return destination

    # It logs every exit code but 0 as an error, below what the run has said itself
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    parameters = RendezvousParameters("c10d", "localhost:0", str(os.getpid()), 1, 1)
    spec = WorkerSpec(
        role="hlat",
        local_world_size=need,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=0,
        local_addr="localhost",
    )
    return LocalElasticAgent(
        spec,
        Logs(str(logs)),
        shutdown_timeout=_SECONDS_TO_END,
        log_line_prefix_template="[rank ${rank}] ",
    )


def _put_aside(log: Path) -> None:
    """Keep what an earlier attempt has written: rank_1.log becomes rank_1.<seconds>.log."""
    if log.exists() and (state := log.stat()).st_size:
        log.rename(log.with_suffix(f".{state.st_mtime_ns // 10**9}.log"))


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for those that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _forwarding(agent: "LocalElasticAgent") -> Iterator[None]:
    """Send the signals of this process on to those that it started."""

    def forward(number: int, frame: FrameType | None) -> None:
        for worker in agent.get_worker_group().workers:
            if worker.id is not None:
                os.kill(worker.id, number)

    before = {number: signal.signal(number, forward) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
