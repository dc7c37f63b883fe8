"""Configuration file of an AWS ParallelCluster with static nodes of one type.

ParallelCluster replaces a drained or dead static node by another instance with the same name, so a
health check only has to drain a faulty node.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from hlat.config.compiler import CompilerConfig
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.hardware import HardwareConfig

from .._job_spec import NODE_TYPES, Accelerator, NodeType
from ._cluster_site import ClusterSite, find_site_problems

SCRIPTS_DIR = Path(__file__).parent
SHARED_DIR = "/fsx"


_NEURON_RELEASES = yaml.safe_load((SCRIPTS_DIR / "neuron_releases.yaml").read_text())
"""Packages to install on Trainium by release of the Neuron SDK."""
GPU_PYTHON_PACKAGES = ("torch==2.13.0",)
"""PyPI's wheel includes CUDA's libraries and NCCL; the image has the driver, EFA and its plugin."""


def build_cluster_config(
    hardware: HardwareConfig, compiler: CompilerConfig, site: ClusterSite
) -> dict[str, Any]:
    """Return the content of the configuration file of ParallelCluster 3.16.

    Raises:
        ConfigError: Unknown instance type, an SDK that it does not support, or contradictory
            settings of the site.
    """
    if hardware.name not in NODE_TYPES:
        raise ConfigError(
            f"hardware.name={hardware.name} is not a known instance type; use hardware=trn1_32xl, "
            "trn1n_32xl, trn2_48xl, trn2u_48xl, a100_p4d, h100_p5, h200_p5e or h200_p5en"
        )
    raise_config_errors(find_site_problems(site, hardware))
    node_type = NODE_TYPES[hardware.name]
    release = _find_neuron_release(hardware, compiler, node_type)
    devices = (node_type.accelerator.value, node_type.num_chips, node_type.num_efa_interfaces)
    bucket, _, prefix = site.scripts.removeprefix("s3://").partition("/")
    values = {
        "site": asdict(site),
        "shared_dir": SHARED_DIR,
        "queue": hardware.name.partition(".")[0],
        "nodes": _build_compute_resource(hardware, node_type),
        "capacity_type": "CAPACITY_BLOCK" if site.capacity_block else "ONDEMAND",
        # The reservation determines the placement; a placement group in addition may find no
        # capacity in it (PlacementGroupCapacityTypeValidator of ParallelCluster)
        "has_placement_group": site.capacity_reservation is None,
        "script_access": {"S3Access": [{"BucketName": bucket, "KeyName": f"{prefix}/*"}]},
        "check_args": ["install", *map(str, devices)],
        "environment_args": [get_environment_dir(compiler), *release["python"]],
        "node_args": release["system"],
    }
    template = OmegaConf.load(SCRIPTS_DIR / "cluster_template.yaml")
    filled: Any = OmegaConf.to_container(
        OmegaConf.merge(template, {"values": values}), resolve=True
    )
    del filled["values"]
    _add_reservation(filled["Scheduling"]["SlurmQueues"][0]["ComputeResources"][0], site)
    _add_accounting_database(filled, site)
    return filled


def get_environment_dir(compiler: CompilerConfig) -> str:
    """Return the directory of the Python environment that head and compute nodes share."""
    return f"{SHARED_DIR}/hlat/{'neuron-' + compiler.neuron_sdk if compiler.neuron_sdk else 'cuda'}"


def _find_neuron_release(
    hardware: HardwareConfig, compiler: CompilerConfig, node_type: NodeType
) -> dict[str, Any]:
    """Return the packages to install."""
    pin = compiler.neuron_sdk
    if node_type.accelerator is Accelerator.gpu:
        if pin is None:
            return {"system": [], "python": GPU_PYTHON_PACKAGES}
        raise ConfigError(
            f"compiler.neuron_sdk={pin}, but hardware.name={hardware.name} has no NeuronCores; "
            "use compiler=none or inductor"
        )
    is_trn1 = "trn1" in hardware.name
    releases = [name for name, r in _NEURON_RELEASES.items() if r["supports_trn1"] or not is_trn1]
    if pin not in releases:
        raise ConfigError(
            f"compiler.neuron_sdk={'null' if pin is None else pin} has no PyTorch of 2.9 or newer "
            f"for hardware.name={hardware.name}; use {' or '.join(releases)}, as in "
            f"compiler=neuron_{releases[0].replace('.', '_')}"
        )
    return _NEURON_RELEASES[pin]


def _build_compute_resource(hardware: HardwareConfig, node_type: NodeType) -> dict[str, Any]:
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
    return nodes


def _add_reservation(nodes: dict[str, Any], site: ClusterSite) -> None:
    """Start the nodes in the capacity reservation, if there is one."""
    if site.capacity_reservation is not None:
        target = "Id" if site.uses_reservation_id else "ResourceGroupArn"
        nodes["CapacityReservationTarget"] = {
            f"CapacityReservation{target}": site.capacity_reservation
        }


def _add_accounting_database(cluster: dict[str, Any], site: ClusterSite) -> None:
    """Run slurmdbd on the head node with a database, if there is one.

    Source: https://docs.aws.amazon.com/parallelcluster/latest/ug/slurm-accounting-v3.html.
    """
    if site.database is None:
        return
    database = {
        "Uri": site.database,
        "UserName": site.database_user,
        "PasswordSecretArn": site.database_password_secret,
    }
    if site.database_name is not None:
        database["DatabaseName"] = site.database_name
    cluster["Scheduling"]["SlurmSettings"]["Database"] = database
    if site.database_security_group is not None:
        networking = cluster["HeadNode"]["Networking"]
        networking["AdditionalSecurityGroups"] = [site.database_security_group]
