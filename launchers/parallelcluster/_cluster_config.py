"""Configuration file of an AWS ParallelCluster with static nodes of one type.

ParallelCluster replaces a drained or dead static node by another instance with the same name, so a
health check only has to drain a faulty node.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.compiler import CompilerConfig
from hlat.config.config_errors import ConfigError
from hlat.config.hardware import HardwareConfig

from .._job_spec import NODE_TYPES, Accelerator, NodeType

SCRIPTS_DIR = Path(__file__).parent
SHARED_DIR, SCRATCH_DIR = "/fsx", "/scratch"
_CHECK_NODE_SCRIPT = "/opt/slurm/etc/scripts/hlat/check_node.sh"
"""Installation path of check_node.sh, in a directory of the head node that all nodes mount."""
_HEALTH_CHECK_INTERVAL_S = 300


@dataclass(frozen=True)
class ClusterSite:
    """Location and resources of a cluster, independent of the run.

    Attributes:
        region: AWS region.
        subnet: Subnet of the compute nodes; private, as nodes with several network cards get no
            public address.
        head_subnet: Public subnet of the head node, for logins.
        key: Name of the key pair for logins.
        scripts: s3://bucket/directory with the scripts of SCRIPTS_DIR.
        head: Instance type of the head node.
        fsx_gib: Capacity of FSx for Lustre.
    """

    region: str
    subnet: str
    head_subnet: str
    key: str
    scripts: str
    head: str
    fsx_gib: int


@dataclass(frozen=True)
class _NeuronRelease:
    """Packages of a release of the Neuron SDK.

    Attributes:
        system_versions: Versions of aws-neuronx-dkms, -collectives, -runtime-lib and -tools.
        python_packages: Requirements for pip.
        supports_trn1: True if its PyTorch runs on trn1.
    """

    system_versions: tuple[str, str, str, str]
    python_packages: tuple[str, ...]
    supports_trn1: bool


_SYSTEM_PACKAGES = tuple(
    f"aws-neuronx-{name}" for name in ("dkms", "collectives", "runtime-lib", "tools")
)
_NEURON_RELEASES = {
    # Manifest of the Neuron documentation (src/helperscripts/n2-manifest.json), 2.28.1 and 2.31.1
    "2.28": _NeuronRelease(
        ("2.26.10.0", "2.30.59.0", "2.30.51.0", "2.28.23.0"),
        (
            "torch-neuronx==2.9.0.2.12.22436",
            "neuronx-cc==2.23.6484.0",
            "neuronx_distributed==0.17.26814",
        ),
        supports_trn1=True,
    ),
    "2.31": _NeuronRelease(
        ("2.29.0.0", "2.33.10.0", "2.33.10.0", "2.31.15.0"),
        (
            "torch-neuronx==2.9.0.2.15.32035",
            "neuronx-cc==2.26.6360.0",
            "neuronx_distributed==0.19.28492",
        ),
        supports_trn1=True,
    ),
    # Release content pages of the SDK and of TorchNeuron for PyTorch 2.13, which excludes trn1
    "2.33": _NeuronRelease(
        ("2.31.7.0", "2.35.43.0", "2.35.30.0", "2.33.38.0"),
        ("torch-neuronx==2.13.3.0.*", "neuronx-cc==2.28.7631.0"),
        supports_trn1=False,
    ),
}
GPU_PYTHON_PACKAGES = ("torch==2.13.0",)
"""PyPI's wheel includes CUDA's libraries and NCCL; the image has the driver, EFA and its plugin."""


def build_cluster_config(
    hardware: HardwareConfig, compiler: CompilerConfig, site: ClusterSite
) -> dict[str, Any]:
    """Return the content of the configuration file of ParallelCluster 3.16.

    Args:
        hardware: Type and number of the nodes.
        compiler: Pinned SDK, which is installed on Trainium.
        site: Location and resources of the cluster.

    Raises:
        ConfigError: Unknown instance type, or an SDK that it does not support.
    """
    if hardware.name not in NODE_TYPES:
        raise ConfigError(
            f"hardware.name={hardware.name} is not a known instance type; use "
            "hardware=trn1_32xl, trn1n_32xl, trn2_48xl, a100_p4d or h100_p5"
        )
    node_type = NODE_TYPES[hardware.name]
    release = _find_neuron_release(hardware, compiler, node_type)
    return {
        "Region": site.region,
        "Image": {"Os": "ubuntu2404"},
        "Imds": {"ImdsSupport": "v2.0"},
        "HeadNode": _build_head_node(node_type, compiler, release, site),
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": {
                "QueueUpdateStrategy": "DRAIN",
                "CustomSlurmSettings": [
                    {"HealthCheckProgram": _CHECK_NODE_SCRIPT},
                    {"HealthCheckInterval": _HEALTH_CHECK_INTERVAL_S},
                    {"HealthCheckNodeState": "IDLE"},
                ],
            },
            "SlurmQueues": [_build_queue(hardware, node_type, release, site)],
        },
        "SharedStorage": [
            {
                "Name": "fsx",
                "MountDir": SHARED_DIR,
                "StorageType": "FsxLustre",
                "FsxLustreSettings": {
                    "StorageCapacity": site.fsx_gib,
                    "DeploymentType": "PERSISTENT_2",
                    "PerUnitStorageThroughput": 250,
                    "DataCompressionType": "LZ4",
                    "DeletionPolicy": "Retain",
                },
            }
        ],
        "Monitoring": {"Logs": {"CloudWatch": {"Enabled": True, "RetentionInDays": 30}}},
    }


def get_environment_dir(compiler: CompilerConfig) -> str:
    """Return the directory of the Python environment that head and compute nodes share."""
    return f"{SHARED_DIR}/hlat/{'neuron-' + compiler.neuron_sdk if compiler.neuron_sdk else 'cuda'}"


def _find_neuron_release(
    hardware: HardwareConfig, compiler: CompilerConfig, node_type: NodeType
) -> _NeuronRelease | None:
    """Return the packages to install on Trainium, or None for GPUs."""
    pin = compiler.neuron_sdk
    if node_type.accelerator is Accelerator.gpu:
        if pin is None:
            return None
        raise ConfigError(
            f"compiler.neuron_sdk={pin}, but hardware.name={hardware.name} has no NeuronCores; "
            "use compiler=none or inductor"
        )
    is_trn1 = "trn1" in hardware.name
    releases = [name for name, r in _NEURON_RELEASES.items() if r.supports_trn1 or not is_trn1]
    if pin not in releases:
        raise ConfigError(
            f"compiler.neuron_sdk={'null' if pin is None else pin} has no PyTorch of 2.9 or newer "
            f"for hardware.name={hardware.name}; use {' or '.join(releases)}, as in "
            f"compiler=neuron_{releases[0].replace('.', '_')}"
        )
    return _NEURON_RELEASES[pin]


def _build_head_node(
    node_type: NodeType, compiler: CompilerConfig, release: _NeuronRelease | None, site: ClusterSite
) -> dict[str, Any]:
    python = release.python_packages if release else GPU_PYTHON_PACKAGES
    devices = (node_type.accelerator.value, node_type.num_chips, node_type.num_efa_interfaces)
    return {
        "InstanceType": site.head,
        "Networking": {"SubnetId": site.head_subnet},
        "Ssh": {"KeyName": site.key},
        "LocalStorage": {"RootVolume": {"Size": 200, "Encrypted": True}},
        "Imds": {"Secured": True},
        "Iam": _build_script_access(site),
        "CustomActions": {
            "OnNodeConfigured": {
                "Sequence": [
                    _build_script_action(site, "check_node.sh", "install", *map(str, devices)),
                    _build_script_action(
                        site, "environment.sh", get_environment_dir(compiler), *python
                    ),
                ]
            }
        },
    }


def _build_queue(
    hardware: HardwareConfig, node_type: NodeType, release: _NeuronRelease | None, site: ClusterSite
) -> dict[str, Any]:
    packages = zip(_SYSTEM_PACKAGES, release.system_versions, strict=True) if release else ()
    nodes: dict[str, Any] = {
        "Name": hardware.name.replace(".", "-"),
        "InstanceType": hardware.name,
        "MinCount": hardware.nodes,
        "MaxCount": hardware.nodes,
        "DisableSimultaneousMultithreading": True,
        "Efa": {"Enabled": True},
    }
    if node_type.accelerator is Accelerator.gpu:
        nodes["HealthChecks"] = {"Gpu": {"Enabled": True}}
    return {
        "Name": hardware.name.partition(".")[0],
        "CapacityType": "ONDEMAND",
        "JobExclusiveAllocation": True,
        "Networking": {"SubnetIds": [site.subnet], "PlacementGroup": {"Enabled": True}},
        "ComputeSettings": {
            "LocalStorage": {
                "RootVolume": {"Size": 512, "Encrypted": True, "VolumeType": "gp3"},
                "EphemeralVolume": {"MountDir": SCRATCH_DIR},
            }
        },
        "ComputeResources": [nodes],
        "Iam": _build_script_access(site),
        "CustomActions": {
            "OnNodeConfigured": _build_script_action(
                site, "node.sh", *(f"{name}={version}" for name, version in packages)
            )
        },
    }


def _build_script_action(site: ClusterSite, name: str, *arguments: str) -> dict[str, Any]:
    return {"Script": f"{site.scripts}/{name}", "Args": list(arguments)}


def _build_script_access(site: ClusterSite) -> dict[str, Any]:
    bucket, _, prefix = site.scripts.removeprefix("s3://").partition("/")
    return {"S3Access": [{"BucketName": bucket, "KeyName": f"{prefix}/*"}]}
