"""Rank of a process and its node, from the variables of torchrun, Slurm and hlat's launchers.

hlat's launchers start one process per node, the supervisor of that node.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hlat.config.config_errors import ConfigError
from hlat.config.engine import EngineBackend
from hlat.config.run import Config

RECORDS_DIR_ENV = "HLAT_RECORDS"
"""Directory of the workers' exit records and heartbeats; set by the supervisor."""
PARENT_PID_ENV = "HLAT_PARENT"
"""PID of the supervisor; set by the supervisor."""
NUM_NODES_ENV, NODE_RANK_ENV, RDZV_ENDPOINT_ENV = "HLAT_NODES", "HLAT_NODE", "HLAT_RDZV_ENDPOINT"
"""Number of nodes, rank of this node (SLURM_NODEID if unset) and host:port on the first node; set
by launchers in the one process per node."""
STOP_FILE_ENV = "HLAT_STOP"
"""File whose existence requests a save and exit; set by launchers that cannot signal all nodes."""
_SLURM = "Slurm"
_LAUNCHER_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    _SLURM: ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
"""Variables of rank, world size and local rank, by launcher."""


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

    The address is the first host of the step.
    """
    if "MASTER_ADDR" in environment or "SLURM_STEP_NODELIST" not in environment:
        return {}
    return {
        "MASTER_ADDR": parse_first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(compute_rendezvous_port(environment)),
    }


def compute_rendezvous_port(environment: Mapping[str, str]) -> int:
    """Return a port that differs between the Slurm jobs of a node, also tasks of an array."""
    # Below Linux's range of ephemeral ports
    return 20000 + int(environment.get("SLURM_JOB_ID", 0)) % 10000


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
