"""What a job is, as plain data that the launcher of every scheduler reads.

A job is the same everywhere: so many whole nodes, on each of them one process that starts and
watches those that train or evaluate, and the variables that this kind of node wants set. How a
scheduler is told of it is its launcher's business. Needs no scheduler and no torch: it is made on a
login node.
"""

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from hlat import compiler, compiler_cache
from hlat.config.engine import Backend
from hlat.config.run import Config
from hlat.jobs.evaluation import Evaluation


class Accelerator(Enum):
    """What a scheduler counts on a node."""

    neuron = "neuron"
    """Trainium chips."""
    gpu = "gpu"
    """NVIDIA GPUs."""


@dataclass(frozen=True)
class Kind:
    """One kind of node as schedulers see it.

    Attributes:
        accelerator: What it has.
        chips: How many of them; a chip of Trainium is several processes.
        efa: Its interfaces of the Elastic Fabric Adapter.
    """

    accelerator: Accelerator
    chips: int
    efa: int


KINDS = {
    "trn1.32xlarge": Kind(Accelerator.neuron, chips=16, efa=8),
    "trn1n.32xlarge": Kind(Accelerator.neuron, chips=16, efa=16),
    "trn2.48xlarge": Kind(Accelerator.neuron, chips=16, efa=16),
    "p4d.24xlarge": Kind(Accelerator.gpu, chips=8, efa=4),
    "p5.48xlarge": Kind(Accelerator.gpu, chips=8, efa=32),
}
"""By hardware.name; of others nothing is claimed. Source: EC2 instance types, specifications of
accelerated computing; for trn1 and trn1n also the Neuron documentation, setup-trn1-multi-node."""

OPEN_FILES = 131071
"""Files that a process may open, where the hard limit allows it (run_llama.sh of awslabs/HLAT)."""


@dataclass(frozen=True)
class Job:
    """A run or an evaluation as a scheduler is told of it.

    The command runs once on every node, with the variables of `environment`, and with those by
    which nodes find each other (hlat.engine.processes): HLAT_NODES, how many there are; HLAT_NODE,
    which of them this is, from 0; and HLAT_MEETING, host and port on the first of them.

    Attributes:
        name: The run's, or that of the evaluation.
        run_folder: Absolute; it is the same on all nodes.
        working_directory: Where the command runs, which relative paths of the configuration mean.
        hardware: Instance type, or another name of the kind of node.
        kind: What schedulers count on such a node; None where that is not known.
        neuron_sdk: Release of the Neuron SDK that the nodes must have; None: none.
        nodes: How many, each for this job alone.
        processes_per_node: How many the command starts on each.
        command: Its words.
        environment: Variables by name.
        entry: Which of hlat's the command runs: train or evaluate.
    """

    name: str
    run_folder: Path
    working_directory: Path
    hardware: str
    kind: Kind | None
    neuron_sdk: str | None
    nodes: int
    processes_per_node: int
    command: tuple[str, ...]
    environment: dict[str, str]
    entry: str = "train"


def job(config: Config, command: tuple[str, ...], working_directory: Path) -> Job:
    """Return the job of a run.

    Args:
        config: The run, resolved.
        command: What runs on each node, see `Job`.
        working_directory: See `Job`.
    """
    assert config.run.name is not None, "resolve names every run"
    return Job(
        name=config.run.name,
        run_folder=working_directory / config.run.root / config.run.name,
        working_directory=working_directory,
        hardware=config.hardware.name,
        kind=KINDS.get(config.hardware.name),
        neuron_sdk=config.compiler.neuron_sdk,
        nodes=config.hardware.nodes,
        processes_per_node=config.num_processes // config.hardware.nodes,
        command=command,
        environment=environment(config),
    )


def evaluation_job(
    evaluation: Evaluation, command: tuple[str, ...], working_directory: Path
) -> Job:
    """Return the job of an evaluation; the arguments are as of `job`."""
    made = job(evaluation.config, command, working_directory)
    return replace(made, name=evaluation.job_name, entry="evaluate")


def compiled(config: Config, working_directory: Path) -> Path | None:
    """Where the graphs of a run lie that are compiled before it; None: there are none to compile.

    Args:
        config: The run, resolved.
        working_directory: See `Job`.
    """
    if config.engine.name is not Backend.nxd or config.compiler.neuron_sdk is None:
        return None
    return compiler_cache.shared(working_directory / config.run.root)


def environment(config: Config) -> dict[str, str]:
    """The variables that the nodes of a run start it with.

    Sources: the scripts of awslabs/HLAT for Trainium, through hlat.compiler; AWS's guide to EFA and
    NCCL for GPUs. What the configuration sets goes before what follows from the kind of node.
    """
    kind = KINDS.get(config.hardware.name)
    variables = {"PYTHONUNBUFFERED": "1"}  # or a log would lag behind what it tells of
    if kind is not None:
        variables |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
        if kind.accelerator is Accelerator.gpu:
            variables["NCCL_SOCKET_IFNAME"] = "^docker,lo,veth"  # hosts cannot reach each other's
    return variables | compiler.environment(config.compiler, config.precision)
