"""Settings of the Kubernetes launcher, and the manifest of a job.

A pod requests all accelerators of a node, so each pod runs on a separate node. The configuration is
a ConfigMap, the code is in the image, and data and run directory are on a volume that all pods
share.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hlat import launch_environment, neuron_compile_cache
from hlat.config import frozen_config
from hlat.config.bounds import bounded, find_bounds_violations
from hlat.config.config_errors import ConfigError, ExitCode

from .._job_spec import Accelerator, JobSpec
from .._sweep_points import PruningConfig


class WorkloadType(Enum):
    """Kubernetes object that runs the pods of a job."""

    JobSet = "JobSet"
    """JobSet of Kubernetes SIGs: restarts all pods after the failure of one."""
    PyTorchJob = "PyTorchJob"
    """PyTorchJob of Kubeflow's training operator: restarts single pods."""


@dataclass
class KubernetesLauncherConfig(PruningConfig):
    """Settings of Kubernetes jobs."""

    _target_: str = (
        "hydra_plugins.hlat_launchers.kubernetes._kubernetes_launcher.KubernetesLauncher"
    )
    image: str | None = None
    """Image with hlat and its dependencies; required."""
    kind: WorkloadType = WorkloadType.JobSet
    """JobSet or PyTorchJob."""
    namespace: str = "default"
    """Namespace of the objects."""
    claim: str = "fsx"
    """Claim of the volume that all pods share, such as one of FSx for Lustre."""
    mount: str = "/fsx"
    """Mount path of the volume, and base directory of relative paths in the configuration."""
    max_attempts: int = bounded(100, min=1)
    """Maximum number of starts of the pods (HLAT's own agent: 100)."""
    precompile: bool = True
    """Compile the graphs of engine=nxd on Trainium in pods before the run; JobSet only."""
    grace_s: int = bounded(300, min=0)
    """Seconds between SIGTERM and SIGKILL of a pod; longer than a save takes."""
    pod: dict[str, Any] = field(default_factory=dict)
    """Further fields of the pod specification, such as tolerations."""


CONFIG_DIR = "/etc/hlat"
"""Mount path of the configuration."""
TRAIN_COMMAND = ("python", "-m", "hlat.train", frozen_config.FROZEN_FLAG, CONFIG_DIR)
_COMPILE_COMMAND = ("python", "-m", "hlat.precompile", frozen_config.FROZEN_FLAG, CONFIG_DIR)
_FETCH_COMMAND = ("python", "-m", "hlat.precompile", "merge")
_RESERVED_POD_FIELDS = {
    "containers",
    "initContainers",
    "nodeSelector",
    "restartPolicy",
    "terminationGracePeriodSeconds",
    "volumes",
}
"""Fields that the launcher sets."""
_RDZV_PORT = 41000
"""Port of the first pod's supervisor (HLAT's MASTER_PORT); each pod has its own address."""
_ACCELERATOR_RESOURCES = {
    Accelerator.neuron: "aws.amazon.com/neuron",
    Accelerator.gpu: "nvidia.com/gpu",
}
_EFA_RESOURCE, _HUGE_PAGES = "vpc.amazonaws.com/efa", "5120Mi"
"""Resource name of EFA interfaces, and the huge pages that libfabric needs for them (Amazon EKS
user guide, machine learning training with EFA)."""
_MEMORY_FRACTION = 0.8
"""Fraction of the node's memory for the pod; the system and daemons use the rest."""
_NON_RETRYABLE_EXIT_CODES = [
    int(code) for code in (ExitCode.CONFIGURATION, ExitCode.DIVERGED, ExitCode.UNHEALTHY_NODE)
]
"""After UNHEALTHY_NODE, Kubernetes would assign the same node until it is cordoned."""
_NON_RETRYABLE_COMPILE_EXIT_CODES = [
    int(code) for code in (ExitCode.FAILED, ExitCode.CONFIGURATION)
]
"""Deterministic failures of the compilation."""
_MAX_NAME_LENGTH = 41
"""Pods append -compile-0-<number>-<5 characters> to the name, and are limited to 63 characters."""


def build_object_name(run_name: str) -> str:
    """Return a DNS label for the objects of a run, unique for every run name."""
    label = re.sub(r"[^a-z0-9]+", "-", f"hlat-{run_name}".lower()).strip("-")
    if label == f"hlat-{run_name}" and len(label) <= _MAX_NAME_LENGTH:
        return label
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:8]
    return f"{label[: _MAX_NAME_LENGTH - 9].rstrip('-')}-{digest}"


def build_manifest(
    job: JobSpec,
    files: dict[str, str],
    settings: KubernetesLauncherConfig,
    graphs_dir: Path | None = None,
) -> list[dict[str, Any]]:
    """Return the YAML documents of a job, in order of creation.

    Args:
        job: The job.
        files: Text of the files in CONFIG_DIR by name; empty for an evaluation.
        settings: Validated settings.
        graphs_dir: Directory of compiled graphs, which a JobSet creates before the run; None to
            skip the compilation.
    """
    metadata: dict[str, Any] = {
        "name": build_object_name(job.name),
        "namespace": settings.namespace,
        "labels": {"app.kubernetes.io/name": "hlat"},
    }
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}
    if settings.kind is WorkloadType.JobSet:
        kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        spec = _build_jobset(job, settings, graphs_dir)
    else:
        kind = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}
        spec = _build_pytorch_job(job, settings)
    workload = {**kind, "metadata": metadata, "spec": spec}
    return [config_map, workload] if files else [workload]


def validate_kubernetes_settings(settings: KubernetesLauncherConfig) -> None:
    """Raise ConfigError if the settings are invalid."""
    problems = [*find_bounds_violations(settings, "hydra.launcher.")]
    if settings.image is None:
        problems.append(
            "hydra.launcher.image is not set; name an image with hlat and its dependencies"
        )
    if not settings.mount.startswith("/"):
        problems.append(
            f"hydra.launcher.mount={settings.mount} is not an absolute path, such as /fsx"
        )
    for key in sorted(_RESERVED_POD_FIELDS & settings.pod.keys()):
        problems.append(f"hydra.launcher.pod.{key} is set by the launcher; remove it")
    if problems:
        raise ConfigError(*problems)


def build_pod_selector(job: JobSpec, settings: KubernetesLauncherConfig) -> str:
    """Return the label selector of a job's first pod, which has the log of the run."""
    name = build_object_name(job.name)
    if settings.kind is WorkloadType.JobSet:
        jobset, first = "jobset.sigs.k8s.io", "batch.kubernetes.io/job-completion-index=0"
        return f"{jobset}/jobset-name={name},{jobset}/replicatedjob-name=node,{first}"
    return f"training.kubeflow.org/job-name={name},training.kubeflow.org/replica-type=master"


def _build_jobset(
    job: JobSpec, settings: KubernetesLauncherConfig, graphs_dir: Path | None
) -> dict[str, Any]:
    """Return the specification of a JobSet that restarts all pods after the failure of one.

    It contains one indexed Job for the run, and one for the compilation if needed.
    """
    name = build_object_name(job.name)

    def build_pod(part: str, container: str, command: Sequence[str]) -> dict[str, Any]:
        command = _build_pod_command(
            job, command, "JOB_COMPLETION_INDEX", f"{name}-{part}-0-0.{name}"
        )
        return _build_pod_spec(job, container, command, settings)

    pod = build_pod("node", job.entry_point, job.command)
    node = _build_replicated_job("node", job.num_nodes, pod, _NON_RETRYABLE_EXIT_CODES)
    replicated_jobs = [node]
    if graphs_dir is not None:
        compile_pod = build_pod("compile", "compile", _COMPILE_COMMAND)
        _mount_compile_cache(job, compile_pod)
        _mount_compile_cache(job, pod)
        (train,) = pod["containers"]
        fetch = {key: value for key, value in train.items() if key != "resources"}
        command = [*_FETCH_COMMAND, _escape_variables(str(graphs_dir))]
        node_pod = node["template"]["spec"]["template"]["spec"]
        node_pod["initContainers"] = [fetch | {"name": "fetch", "command": command}]
        node["dependsOn"] = [{"name": "compile", "status": "Complete"}]
        compile_job = _build_replicated_job(
            "compile", job.num_nodes, compile_pod, _NON_RETRYABLE_COMPILE_EXIT_CODES
        )
        replicated_jobs = [compile_job, node]
    never_again = {
        "name": "never_again",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "failurePolicy": {"maxRestarts": settings.max_attempts - 1, "rules": [never_again]},
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": replicated_jobs,
    }


def _build_replicated_job(
    name: str, num_nodes: int, pod: dict[str, Any], non_retryable_exit_codes: list[int]
) -> dict[str, Any]:
    """Return an indexed Job with one pod per node."""
    container = pod["containers"][0]["name"]
    codes = {"containerName": container, "operator": "In", "values": non_retryable_exit_codes}
    indexed_job = {
        "completions": num_nodes,
        "parallelism": num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    return {"name": name, "replicas": 1, "template": {"spec": indexed_job}}


def _mount_compile_cache(job: JobSpec, pod: dict[str, Any]) -> None:
    """Mount a directory for compiled graphs at the compiler's cache path in all containers."""
    path = str(neuron_compile_cache.get_cache_dir(job.environment))
    pod["volumes"].append({"name": "compiled", "emptyDir": {}})
    for container in pod["containers"]:
        container["volumeMounts"].append({"name": "compiled", "mountPath": path})


def _build_pytorch_job(job: JobSpec, settings: KubernetesLauncherConfig) -> dict[str, Any]:
    """Return the specification of a PyTorchJob that restarts a pod terminated by a signal."""
    first_pod = f"{build_object_name(job.name)}-master-0"
    command = _build_pod_command(job, job.command, "RANK", first_pod)
    template = {"spec": _build_pod_spec(job, "pytorch", command, settings)}
    replicas = {"Master": 1, "Worker": job.num_nodes - 1}
    return {
        "runPolicy": {"backoffLimit": settings.max_attempts, "cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "ExitCode", "template": template}
            for role, count in replicas.items()
            if count
        },
    }


def _build_pod_command(
    job: JobSpec, command: Sequence[str], index_variable: str, first_pod: str
) -> list[str]:
    """Return a command that sets the rendezvous variables with `env`.

    Kubernetes expands `index_variable` in the command; the value of an environment variable could
    not refer to it, as operators append it after the others.
    """
    variables = (
        f"{launch_environment.NUM_NODES_ENV}={job.num_nodes}",
        f"{launch_environment.NODE_RANK_ENV}=$({index_variable})",
        f"{launch_environment.RDZV_ENDPOINT_ENV}={first_pod}:{_RDZV_PORT}",
    )
    return ["env", *variables, *map(_escape_variables, command)]


def _escape_variables(text: str) -> str:
    """Return text in which Kubernetes expands no `$(NAME)`."""
    return text.replace("$", "$$")


def _build_pod_spec(
    job: JobSpec, container_name: str, command: list[str], settings: KubernetesLauncherConfig
) -> dict[str, Any]:
    configuration = [{"name": "configuration"}] if job.entry_point == "train" else []
    config_map = {"configMap": {"name": build_object_name(job.name)}}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": settings.grace_s,
        "containers": [
            {
                "name": container_name,
                "image": settings.image,
                "command": command,
                "workingDir": settings.mount,
                "env": [
                    {"name": variable, "value": _escape_variables(value)}
                    for variable, value in sorted(job.environment.items())
                ],
                "resources": _build_resources(job),
                "volumeMounts": [
                    {"name": "shared", "mountPath": settings.mount},
                    {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 (path in the pod)
                    *({**v, "mountPath": CONFIG_DIR, "readOnly": True} for v in configuration),
                ],
            }
        ],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *({**volume, **config_map} for volume in configuration),
        ],
    }
    if job.node_type is not None:
        spec["nodeSelector"] = {"node.kubernetes.io/instance-type": job.instance_type}
    assert not spec.keys() & settings.pod.keys(), "validate_kubernetes_settings rejects these"
    return spec | settings.pod


def _build_resources(job: JobSpec) -> dict[str, Any]:
    """Return all resources of a node, so that a pod has it exclusively; empty if unknown."""
    if job.node_type is None:
        return {}
    limits: dict[str, Any] = {
        _ACCELERATOR_RESOURCES[job.node_type.accelerator]: job.node_type.num_chips,
        _EFA_RESOURCE: job.node_type.num_efa_interfaces,
        "hugepages-2Mi": _HUGE_PAGES,
    }
    if job.host_memory_gib is not None:
        limits["memory"] = f"{math.floor(job.host_memory_gib * _MEMORY_FRACTION)}Gi"
    return {"limits": limits, "requests": limits}
