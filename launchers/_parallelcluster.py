"""An AWS ParallelCluster of whole nodes for one kind of run, as the data of its configuration file.

Nodes are static: ParallelCluster puts another instance in the place of one that is drained or dead,
under the same name. So all that is left to do here is to drain a node that has lost something.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.compiler import Compiler
from hlat.config.errors import ConfigError
from hlat.config.hardware import Hardware

from ._job import KINDS, Accelerator, Kind

SCRIPTS = Path(__file__).parent / "parallelcluster"
SHARED, SCRATCH = "/fsx", "/scratch"
_CHECK_NODE = "/opt/slurm/etc/scripts/hlat/check_node.sh"
"""Where check_node.sh puts itself, on a folder of the head node that all nodes mount."""
_SECONDS_BETWEEN_CHECKS = 300


@dataclass(frozen=True)
class Site:
    """Where a cluster stands and what it is given; a run does not say that.

    Attributes:
        region: Of AWS.
        subnet: Of the compute nodes; private, as nodes with several network cards get no public
            address.
        head_subnet: Of the head node; public, so that it can be logged in to.
        key: Name of the key pair for that.
        scripts: s3://bucket/folder with the files of SCRIPTS.
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
class _Release:
    """What a release of the Neuron SDK consists of.

    Attributes:
        system: Versions of aws-neuronx-dkms, -collectives, -runtime-lib and -tools.
        python: What pip installs.
        trn1: Whether its PyTorch runs on trn1.
    """

    system: tuple[str, str, str, str]
    python: tuple[str, ...]
    trn1: bool


_SYSTEM_PACKAGES = tuple(
    f"aws-neuronx-{name}" for name in ("dkms", "collectives", "runtime-lib", "tools")
)
_RELEASES = {
    # Manifest of the Neuron documentation (src/helperscripts/n2-manifest.json), 2.28.1 and 2.31.1
    "2.28": _Release(
        ("2.26.10.0", "2.30.59.0", "2.30.51.0", "2.28.23.0"),
        (
            "torch-neuronx==2.9.0.2.12.22436",
            "neuronx-cc==2.23.6484.0",
            "neuronx_distributed==0.17.26814",
        ),
        trn1=True,
    ),
    "2.31": _Release(
        ("2.29.0.0", "2.33.10.0", "2.33.10.0", "2.31.15.0"),
        (
            "torch-neuronx==2.9.0.2.15.32035",
            "neuronx-cc==2.26.6360.0",
            "neuronx_distributed==0.19.28492",
        ),
        trn1=True,
    ),
    # Its release content page, and that of TorchNeuron for PyTorch 2.13, which is not for trn1
    "2.33": _Release(
        ("2.31.7.0", "2.35.43.0", "2.35.30.0", "2.33.38.0"),
        ("torch-neuronx==2.13.3.0.*", "neuronx-cc==2.28.7631.0"),
        trn1=False,
    ),
}
GPU_PYTHON = ("torch==2.13.0",)
"""PyPI's wheel brings CUDA's libraries and NCCL; the image has the driver, EFA and its plugin."""


def describe(hardware: Hardware, compiler: Compiler, site: Site) -> dict[str, Any]:
    """Return the configuration file of the cluster, as ParallelCluster 3.16 reads it.

    Args:
        hardware: Kind and number of the nodes.
        compiler: Its pin decides what is installed on Trainium.
        site: Everything else.

    Raises:
        ConfigError: They do not go together.
    """
    kind = _kind(hardware)
    release = _release(hardware, compiler, kind)
    return {
        "Region": site.region,
        "Image": {"Os": "ubuntu2404"},
        "Imds": {"ImdsSupport": "v2.0"},
        "HeadNode": _head(kind, compiler, release, site),
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": {
                "QueueUpdateStrategy": "DRAIN",
                "CustomSlurmSettings": [
                    {"HealthCheckProgram": _CHECK_NODE},
                    {"HealthCheckInterval": _SECONDS_BETWEEN_CHECKS},
                    {"HealthCheckNodeState": "IDLE"},
                ],
            },
            "SlurmQueues": [_queue(hardware, kind, release, site)],
        },
        "SharedStorage": [
            {
                "Name": "fsx",
                "MountDir": SHARED,
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


def environment_folder(compiler: Compiler) -> str:
    """Return the folder of the Python environment that head and compute nodes share."""
    return f"{SHARED}/hlat/{'neuron-' + compiler.neuron_sdk if compiler.neuron_sdk else 'cuda'}"


def _kind(hardware: Hardware) -> Kind:
    if hardware.name not in KINDS:
        known = "hardware=trn1_32xl, trn1n_32xl, trn2_48xl, a100_p4d or h100_p5"
        raise ConfigError(
            f"hardware.name={hardware.name} is no instance type known here; use {known}"
        )
    return KINDS[hardware.name]


def _release(hardware: Hardware, compiler: Compiler, kind: Kind) -> _Release | None:
    """What has to be installed on Trainium; None on GPUs."""
    pin = compiler.neuron_sdk
    if kind.accelerator is Accelerator.gpu:
        if pin is None:
            return None
        raise ConfigError(
            f"compiler.neuron_sdk={pin}, but hardware.name={hardware.name} has no NeuronCores; "
            "use compiler=none or inductor"
        )
    fitting = [name for name, r in _RELEASES.items() if r.trn1 or "trn1" not in hardware.name]
    if pin not in fitting:
        shown = "null" if pin is None else pin
        raise ConfigError(
            f"compiler.neuron_sdk={shown} has no PyTorch of 2.9 or newer that "
            f"hardware.name={hardware.name} could run; use {' or '.join(fitting)}, as in "
            f"compiler=neuron_{fitting[0].replace('.', '_')}"
        )
    return _RELEASES[pin]


def _head(kind: Kind, compiler: Compiler, release: _Release | None, site: Site) -> dict[str, Any]:
    python = release.python if release else GPU_PYTHON
    counts = (kind.accelerator.value, str(kind.chips), str(kind.efa))
    return {
        "InstanceType": site.head,
        "Networking": {"SubnetId": site.head_subnet},
        "Ssh": {"KeyName": site.key},
        "LocalStorage": {"RootVolume": {"Size": 200, "Encrypted": True}},
        "Imds": {"Secured": True},
        "Iam": _reads_scripts(site),
        "CustomActions": {
            "OnNodeConfigured": {
                "Sequence": [
                    _script(site, "check_node.sh", "install", *counts),
                    _script(site, "environment.sh", environment_folder(compiler), *python),
                ]
            }
        },
    }


def _queue(hardware: Hardware, kind: Kind, release: _Release | None, site: Site) -> dict[str, Any]:
    packages = zip(_SYSTEM_PACKAGES, release.system, strict=True) if release else ()
    nodes: dict[str, Any] = {
        "Name": hardware.name.replace(".", "-"),
        "InstanceType": hardware.name,
        "MinCount": hardware.nodes,
        "MaxCount": hardware.nodes,
        "DisableSimultaneousMultithreading": True,
        "Efa": {"Enabled": True},
    }
    if kind.accelerator is Accelerator.gpu:
        nodes["HealthChecks"] = {"Gpu": {"Enabled": True}}
    return {
        "Name": hardware.name.partition(".")[0],
        "CapacityType": "ONDEMAND",
        "JobExclusiveAllocation": True,
        "Networking": {"SubnetIds": [site.subnet], "PlacementGroup": {"Enabled": True}},
        "ComputeSettings": {
            "LocalStorage": {
                "RootVolume": {"Size": 512, "Encrypted": True, "VolumeType": "gp3"},
                "EphemeralVolume": {"MountDir": SCRATCH},
            }
        },
        "ComputeResources": [nodes],
        "Iam": _reads_scripts(site),
        "CustomActions": {
            "OnNodeConfigured": _script(
                site, "node.sh", *(f"{name}={version}" for name, version in packages)
            )
        },
    }


def _script(site: Site, name: str, *words: str) -> dict[str, Any]:
    return {"Script": f"{site.scripts}/{name}", "Args": list(words)}


def _reads_scripts(site: Site) -> dict[str, Any]:
    bucket, _, folder = site.scripts.removeprefix("s3://").partition("/")
    return {"S3Access": [{"BucketName": bucket, "KeyName": f"{folder}/*"}]}
