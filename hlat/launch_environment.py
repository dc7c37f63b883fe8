"""Environment variables, signals, exit records and heartbeats of the processes of a run.

torchrun and Slurm set the rank of a process in its environment. A worker that hlat's supervisor
launched writes how it ended to an exit record and extends the deadline of its heartbeat. hlat's
launchers start one process per node, the supervisor of that node.
"""

import ctypes
import faulthandler
import json
import mmap
import os
import re
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.engine import EngineBackend
from hlat.config.redaction import redact_data
from hlat.config.run import Config
from hlat.storage.durable_files import replace_file

RECORDS_DIR_ENV = "HLAT_RECORDS"
"""Directory of the workers' exit records and heartbeats; set by the supervisor."""
PARENT_PID_ENV = "HLAT_PARENT"
"""PID of the supervisor; set by the supervisor."""
NUM_NODES_ENV, NODE_RANK_ENV, RDZV_ENDPOINT_ENV = "HLAT_NODES", "HLAT_NODE", "HLAT_RDZV_ENDPOINT"
"""Number of nodes, rank of this node (SLURM_NODEID if unset) and host:port on the first node; set
by launchers in the one process per node."""
STOP_FILE_ENV = "HLAT_STOP"
"""File whose existence requests a save and exit; set by launchers that cannot signal all nodes."""
STOP_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
"""Signals on which a run saves its state and ends with exit code 75: Ctrl-C, those with which
schedulers end a job or announce its time limit, and the one of a CPU time limit."""
DUMP_SIGNAL = signal.SIGQUIT
"""Signal on which a process writes the stacks of its threads and continues."""
_SLURM = "Slurm"
_LAUNCHER_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    _SLURM: ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
"""Variables of rank, world size and local rank, by launcher."""
_STDERR = 2
"""File descriptor."""
_PR_SET_PDEATHSIG = 1
"""Constant of linux/prctl.h."""
_DEADLINE_STRUCT = struct.Struct("d")
_HEARTBEAT_BYTES = _DEADLINE_STRUCT.size + 1


class SetupStoppedError(BaseException):
    """A stop signal before training, when there is nothing to save; the text is its name."""


@dataclass(frozen=True)
class RankInfo:
    """Rank of a process among those that one launcher started, which messages name."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "none"

    @property
    def is_rank0(self) -> bool:
        """True on rank 0 (`rank_zero_only` in Lightning), the process that writes the logs."""
        return self.rank == 0


@dataclass(frozen=True)
class NodeInfo:
    """Rank of a node in a job, and host and port of the supervisor on the first node."""

    node_rank: int
    num_nodes: int
    host: str
    port: int


def read_node_info(environment: Mapping[str, str] = os.environ) -> NodeInfo | None:
    """Return the node that this process supervises; None if no hlat launcher started it."""
    if RDZV_ENDPOINT_ENV not in environment or RECORDS_DIR_ENV in environment:
        return None
    host, _, port = environment[RDZV_ENDPOINT_ENV].rpartition(":")
    rank = environment.get(NODE_RANK_ENV) or environment["SLURM_NODEID"]
    return NodeInfo(int(rank), int(environment[NUM_NODES_ENV]), host, int(port))


def read_rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Return the rank of this process from the variables of torchrun or Slurm's srun."""
    for launcher, names in _LAUNCHER_VARIABLES.items():
        if all(name in environment for name in names):
            rank, world_size, local_rank = (int(environment[name]) for name in names)
            return RankInfo(rank, world_size, local_rank, launcher)
    return RankInfo()


def is_first_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True for rank 0, and for the supervisor on the first node."""
    node = read_node_info(environment)
    return read_rank_info(environment).is_rank0 if node is None else node.node_rank == 0


def build_rendezvous_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT of a Slurm job step; {} if they are set or outside Slurm.

    The address is the first host of the step. The port depends on the job, so that two jobs on one
    node have different ports.
    """
    if "MASTER_ADDR" in environment or "SLURM_STEP_NODELIST" not in environment:
        return {}
    job = int(environment.get("SLURM_JOB_ID", 0))
    return {
        "MASTER_ADDR": parse_first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(20000 + job % 10000),
    }


def parse_first_host(hosts: str) -> str:
    """Return the first host of Slurm's list: trn-003 of trn-[003-007,9],other."""
    match = re.fullmatch(r"([^\[,]*)(?:\[(\w+)[^\]]*\](\S*?))?(?:,.*)?", hosts)
    assert match is not None, hosts
    return "".join(part or "" for part in match.groups())


def must_launch_workers(config: Config) -> bool:
    """Return True if this process launches and supervises workers instead of training.

    Raises:
        ConfigError: The number of processes or nodes does not match the layout, or the launcher
            does not suit the engine.
    """
    if (node := read_node_info()) is not None:
        if node.num_nodes != config.hardware.nodes:
            raise ConfigError(
                f"hardware.nodes={config.hardware.nodes}, but the job has "
                f"{NUM_NODES_ENV}={node.num_nodes}; start it on {config.hardware.nodes} nodes"
            )
        return True
    info, needed = read_rank_info(), config.num_processes
    if config.engine.name is EngineBackend.nxd and info.world_size > 1 and info.launcher == _SLURM:
        raise ConfigError(
            f"engine.name=nxd needs torchrun, and srun started {info.world_size} processes: "
            "torch_xla assigns NeuronCores by the variables of torchrun; add "
            "hydra/launcher=slurm, or start torchrun on each node with srun --ntasks-per-node=1"
        )
    if info.world_size == needed and (info != RankInfo() or config.recovery.max_restarts == 0):
        return False
    layout = config.parallelism
    requirement = (
        f"parallelism.tp={layout.tp} x pp={layout.pp} on hardware={config.hardware.name} needs "
        f"{needed} processes"
    )
    if info.world_size > 1:
        raise ConfigError(
            f"{requirement}, {info.launcher} started {info.world_size}; start {needed}, or set "
            "parallelism and hardware.nodes x processes_per_node to match"
        )
    if config.hardware.nodes > 1:
        raise ConfigError(
            f"{requirement} on hardware.nodes={config.hardware.nodes}, and this is one process on "
            "one node; add hydra/launcher=slurm, or start all of them with torchrun or srun"
        )
    return True


def run_with_exit_record(run: Callable[[], ExitCode]) -> ExitCode:
    """Run, and write an exit record if the supervisor launched this process.

    TorchElastic terminates all workers as soon as one of them exits with a code other than 0. An
    exit that all workers agreed on therefore returns 0 and records the exit code of the run.
    Another exit records its time, with which the supervisor finds the cause.
    """
    if RECORDS_DIR_ENV not in os.environ:
        return run()
    _exit_with_parent()
    register_stack_dumps()
    path = Path(os.environ[RECORDS_DIR_ENV]) / f"{read_rank_info().rank}.json"
    try:
        replace_file(path, json.dumps({"exit": run()}).encode())
    except (Exception, SetupStoppedError) as error:
        problems = error.problems if isinstance(error, ConfigError) else None
        code = ExitCode.FAILED if problems is None else ExitCode.CONFIGURATION
        if isinstance(error, SetupStoppedError):
            code = ExitCode.PREEMPTED
        trace = traceback.format_exc()
        record = {"exit": code, "time": time.time(), "problems": problems, "trace": trace}
        replace_file(path, json.dumps(redact_data(record)).encode())
        sys.stdout.flush()
        # A normal exit would wait for threads that are blocked in collectives with dead ranks
        os._exit(code)
    return ExitCode.FINISHED


def register_stack_dumps() -> None:
    """Write the stacks of all threads on `DUMP_SIGNAL`.

    A supervised process writes to the file that its supervisor reads, another one to stderr.
    """
    path = find_stacks_path(read_rank_info().rank)
    file = _STDERR if path is None else path.open("a")  # faulthandler keeps a reference to it
    faulthandler.register(DUMP_SIGNAL, file, all_threads=True)


@contextmanager
def block_signals() -> Iterator[None]:
    """Start child processes that never receive the signals of the run.

    Schedulers signal every process of a job, and a terminal every process of the foreground. A
    child process inherits the signal mask of the thread that starts it.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, DUMP_SIGNAL))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def kill_with_parent() -> None:
    """Make Linux kill this process when the thread that started it ends, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_parent() -> None:
    """Call `kill_with_parent`, and exit if the parent has died already.

    An orphan would lock the run directory and wait for its peers forever.
    """
    kill_with_parent()
    if os.getppid() != int(os.environ[PARENT_PID_ENV]):
        os._exit(ExitCode.FAILED)


class Heartbeat:
    """Deadline of a worker in shared memory: the worker extends it, the supervisor checks it.

    The deadline is a time of the monotonic clock; 0 disables it. A byte follows it, which is 1 once
    the worker has started. A new file contains 0.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            if file.tell() < _HEARTBEAT_BYTES:
                file.write(bytes(_HEARTBEAT_BYTES))
                file.flush()
            self._memory = mmap.mmap(file.fileno(), _HEARTBEAT_BYTES)

    def set_deadline(self, seconds: float | None) -> None:
        """Set the deadline to `seconds` from now; None disables it."""
        deadline = 0.0 if seconds is None else time.monotonic() + seconds
        _DEADLINE_STRUCT.pack_into(self._memory, 0, deadline)

    def is_expired(self) -> bool:
        """Return True if the deadline has passed."""
        deadline: float = _DEADLINE_STRUCT.unpack_from(self._memory)[0]
        return 0 < deadline < time.monotonic()

    @property
    def has_started(self) -> bool:
        """True if the worker has trained a step, or has built its engine for another command."""
        return bool(self._memory[-1])

    @has_started.setter
    def has_started(self, value: bool) -> None:
        self._memory[-1] = value


def open_heartbeat() -> Heartbeat | None:
    """Return the heartbeat of this process; None without a supervisor."""
    if (records_dir := os.environ.get(RECORDS_DIR_ENV)) is None:
        return None
    return Heartbeat(get_heartbeat_path(Path(records_dir), read_rank_info().rank))


def record_start() -> None:
    """Record that this worker has started, for its supervisor."""
    if (heartbeat := open_heartbeat()) is not None:
        heartbeat.has_started = True


def get_heartbeat_path(records_dir: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return records_dir / f"{rank}.pulse"


def find_stacks_path(rank: int) -> Path | None:
    """Return the path of the stacks of this process; None without a supervisor."""
    if (records_dir := os.environ.get(RECORDS_DIR_ENV)) is None:
        return None
    return get_stacks_path(Path(records_dir), rank)


def get_stacks_path(records_dir: Path, rank: int) -> Path:
    """Return the path of a rank's stacks."""
    return records_dir / f"rank_{rank}.stacks"
