"""Scheduler-independent specification of a job, built on a login node without torch.

Every job uses whole nodes. On each node, one process starts and supervises the processes that train
or evaluate, with the environment variables of the node type.
"""

import hashlib
import re
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from hlat.config.command_job import CommandJob
from hlat.config.engine_capabilities import ENGINE_CAPABILITIES
from hlat.config.run import Config
from hlat.engine.neuron import neuron_compile_cache, neuron_environment


class Accelerator(Enum):
    """Resource that a scheduler counts on a node: Trainium chips or NVIDIA GPUs."""

    neuron = "neuron"
    gpu = "gpu"


@dataclass(frozen=True)
class NodeType:
    """Resources of one type of node; several processes share a chip of Trainium."""

    accelerator: Accelerator
    num_chips: int
    num_efa_interfaces: int
    has_capacity_blocks: bool = True


NODE_TYPES = {
    "trn1.32xlarge": NodeType(Accelerator.neuron, num_chips=16, num_efa_interfaces=8),
    "trn1n.32xlarge": NodeType(Accelerator.neuron, 16, 16, has_capacity_blocks=False),
    "trn2.48xlarge": NodeType(Accelerator.neuron, num_chips=16, num_efa_interfaces=16),
    "trn2u.48xlarge": NodeType(Accelerator.neuron, num_chips=16, num_efa_interfaces=16),
    "p4d.24xlarge": NodeType(Accelerator.gpu, num_chips=8, num_efa_interfaces=4),
    "p5.48xlarge": NodeType(Accelerator.gpu, num_chips=8, num_efa_interfaces=32),
    "p5e.48xlarge": NodeType(Accelerator.gpu, num_chips=8, num_efa_interfaces=32),
    "p5en.48xlarge": NodeType(Accelerator.gpu, num_chips=8, num_efa_interfaces=16),
}
"""Known node types by hardware.name. Source: EC2's DescribeInstanceTypes (EfaInfo, GpuInfo,
NeuronInfo, SupportedUsageClasses), with which tests/schemas compares them; for trn1 and trn1n also
the Neuron documentation, setup-trn1-multi-node, and for p5 and p5e
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html."""

SINGLE_GPUS = ("a100", "h100", "h200", "rtx_4090", "rtx_5090", "mi300x")
"""hardware.name of GPUs whose number per node is hardware.processes_per_node."""

MAX_OPEN_FILES = 131071
"""Open files per process, where the hard limit allows it (run_llama.sh of awslabs/HLAT)."""

_MAX_NAME_LENGTH = 41
"""Pods of Kubernetes append -compile-0-<number>-<5 characters> to the name, and are limited to 63
characters."""


@dataclass(frozen=True)
class JobSpec:
    """Specification of a training or evaluation job.

    The command runs once on every node with the variables of `environment` and the rendezvous
    variables of hlat.distributed.rank_environment: HLAT_NODES, the number of nodes; HLAT_NODE, the
    index of this node; and HLAT_RDZV_ENDPOINT, host and port on the first node.
    Relative paths in the configuration refer to `working_directory`; `run_dir` is absolute, and the
    same on all nodes. `node_type` and `host_memory_gib` are None if unknown; `num_gpus` are those
    of a node that the job requests; `entry_point` is the name of a command.
    """

    name: str
    run_dir: Path
    working_directory: Path
    instance_type: str
    node_type: NodeType | None
    num_nodes: int
    command: tuple[str, ...]
    environment: dict[str, str]
    host_memory_gib: float | None = None
    entry_point: str = "train"
    num_gpus: int = 0


def build_object_name(run_name: str) -> str:
    """Return a DNS label for the objects of a run, unique for every run name."""
    label = re.sub(r"[^a-z0-9]+", "-", f"hlat-{run_name}".lower()).strip("-")
    if label == f"hlat-{run_name}" and len(label) <= _MAX_NAME_LENGTH:
        return label
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:8]
    return f"{label[: _MAX_NAME_LENGTH - 9].rstrip('-')}-{digest}"


def build_job(config: Config, command: tuple[str, ...], working_directory: Path) -> JobSpec:
    """Return the job of a run with a resolved configuration; see `JobSpec` for the arguments."""
    assert config.run.name is not None, "resolve_config sets the name"
    return JobSpec(
        name=config.run.name,
        run_dir=working_directory / config.run.root / config.run.name,
        working_directory=working_directory,
        instance_type=config.hardware.name,
        node_type=NODE_TYPES.get(config.hardware.name),
        num_nodes=config.hardware.nodes,
        command=command,
        environment=build_job_environment(config),
        host_memory_gib=config.hardware.host_memory_gib,
        num_gpus=count_gpus(config),
    )


def count_gpus(config: Config) -> int:
    """Return the GPUs of a node that a run uses; 0 on other hardware, or if they are unknown."""
    hardware = config.hardware
    node_type = NODE_TYPES.get(hardware.name)
    if node_type is not None:
        return node_type.num_chips if node_type.accelerator is Accelerator.gpu else 0
    is_gpu = hardware.name in SINGLE_GPUS and config.engine.device != "cpu"
    return config.num_processes // hardware.nodes if is_gpu else 0


def build_command_job(
    job: CommandJob, command: tuple[str, ...], working_directory: Path
) -> JobSpec:
    """Return the job of a command; see `JobSpec` for the arguments."""
    spec = build_job(job.config, command, working_directory)
    return replace(spec, name=job.job_name, entry_point=job.command)


def get_compiled_graphs_dir(config: Config, working_directory: Path) -> Path | None:
    """Return the directory of graphs to compile before a run, or None if there are none."""
    compiles_ahead = ENGINE_CAPABILITIES[config.engine.name].compiles_ahead
    if not compiles_ahead or config.compiler.neuron_sdk is None:
        return None
    return neuron_compile_cache.get_shared_cache_dir(working_directory / config.run.root)


def build_job_environment(config: Config) -> dict[str, str]:
    """Return the environment variables of a run on its nodes.

    Variables of the configuration override those of the node type. Sources: the scripts of
    awslabs/HLAT for Trainium (hlat/engine/neuron); AWS's guide to EFA and NCCL for GPUs.
    """
    node_type = NODE_TYPES.get(config.hardware.name)
    variables = {"PYTHONUNBUFFERED": "1"}  # writes log lines immediately
    if node_type is not None:
        variables |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
        if node_type.accelerator is Accelerator.gpu:
            variables["NCCL_SOCKET_IFNAME"] = "^docker,lo,veth"  # not reachable from other hosts
    return variables | neuron_environment.build_neuron_environment(
        config.compiler, config.precision
    )
