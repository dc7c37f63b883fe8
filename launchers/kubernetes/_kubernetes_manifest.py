"""Settings of the Kubernetes launcher, and the manifest of a job.

A pod requests all accelerators of a node, so each pod runs on a separate node. The configuration is
a ConfigMap, the code is in the image, and data and run directory are on a volume that all pods
share.
"""

import json
import math
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hlat.config import frozen_config
from hlat.config.bounds import bounded
from hlat.config.config_errors import ExitCode
from hlat.distributed import rank_environment
from hlat.engine.neuron import neuron_compile_cache

from .._job_spec import Accelerator, JobSpec, build_object_name
from .._pruning_settings import PruningConfig

if TYPE_CHECKING:
    from jinja2 import Template


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
    ttl_s: int | None = bounded(None, min=0)
    """Seconds between the end of the job and the deletion of its JobSet or PyTorchJob with all pods
    and their logs; null: no deletion."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the pods; they override variables of the instance type. The manifest
    contains the values, so secrets belong in secret_env."""
    secret_env: dict[str, str] = field(default_factory=dict)
    """Environment variables from Secrets of the namespace, in the form SECRET/KEY."""
    labels: dict[str, str] = field(default_factory=dict)
    """Further labels of the JobSet or PyTorchJob."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Annotations of the JobSet or PyTorchJob."""
    pod_labels: dict[str, str] = field(default_factory=dict)
    """Labels of the pods."""
    pod_annotations: dict[str, str] = field(default_factory=dict)
    """Annotations of the pods."""
    queue: str | None = None
    """Kueue's LocalQueue of the job, in the same namespace; null: no queue."""
    scheduler_name: str | None = None
    """Scheduler with the coscheduling plugin, which assigns all pods to nodes or none; null: the
    cluster's default scheduler."""
    cpus: int | None = bounded(None, min=1)
    """CPU cores that a pod requests, without a limit; null: no request."""
    memory_gib: int | None = bounded(None, min=1)
    """Memory that a pod requests, which is also its limit, in GiB; null: 80% of the node's memory
    where it is known."""
    exclude: list[str] = field(default_factory=list)
    """Nodes without pods of this job, by their label kubernetes.io/hostname."""
    pod: dict[str, Any] = field(default_factory=dict)
    """Further fields of the pod specification, such as tolerations."""
    dry_run: bool = False
    """Write and print the manifests, and create nothing. Needs no cluster."""


CONFIG_DIR = "/etc/hlat"
"""Mount path of the configuration."""
TRAIN_COMMAND = ("python", "-m", "hlat.train", frozen_config.FROZEN_FLAG, CONFIG_DIR)
_COMPILE_COMMAND = ("python", "-m", "hlat.precompile", frozen_config.FROZEN_FLAG, CONFIG_DIR)
_FETCH_COMMAND = ["python", "-m", "hlat.precompile", "merge"]
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
NAME_LABEL = "app.kubernetes.io/name"
"""Label of all objects of hlat."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of a JobSet or PyTorchJob with its LocalQueue. Kueue's webhook suspends the object, so the
manifest does not set suspend (https://kueue.sigs.k8s.io/docs/tasks/run/jobs/)."""
POD_GROUP_LABEL = "scheduling.x-k8s.io/pod-group"
"""Label of the pods of a PodGroup, of which the coscheduling plugin schedules at least minMember
(https://scheduler-plugins.sigs.k8s.io/docs/plugins/coscheduling/)."""
_NON_RETRYABLE_EXIT_CODES = [
    int(code) for code in (ExitCode.CONFIGURATION, ExitCode.DIVERGED, ExitCode.UNHEALTHY_NODE)
]
"""After UNHEALTHY_NODE, Kubernetes would assign the same node until it is cordoned."""
_NON_RETRYABLE_COMPILE_EXIT_CODES = [
    int(code) for code in (ExitCode.FAILED, ExitCode.CONFIGURATION)
]
"""Deterministic failures of the compilation."""


def _format_flow_yaml(value: Any) -> str:
    """Return a value as JSON in ASCII, which is YAML with escapes of eight digits."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", text)


def _escape_variables(text: str) -> str:
    """Return text in which Kubernetes expands no `$(NAME)`."""
    return text.replace("$", "$$")


def _load_template(name: str) -> "Template":
    """Return a template of this directory."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # slow import

    templates = Environment(  # noqa: S701  not HTML
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"to_yaml": _format_flow_yaml, "escape_variables": _escape_variables}
    return templates.get_template(name)


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
    name = build_object_name(job.name)
    cache_dir, parts = "", ["node"]
    if graphs_dir is not None and settings.kind is WorkloadType.JobSet:
        cache_dir = str(neuron_compile_cache.get_cache_dir(job.environment | settings.env))
        parts = ["compile", "node"]

    def build_variables(index_variable: str, first_pod: str) -> list[str]:
        return [
            f"{rank_environment.NUM_NODES_ENV}={job.num_nodes}",
            f"{rank_environment.NODE_RANK_ENV}=$({index_variable})",
            f"{rank_environment.RDZV_ENDPOINT_ENV}={first_pod}:{_RDZV_PORT}",
        ]

    text = _load_template("manifest.yaml.j2").render(
        job=job,
        files=files,
        settings=settings,
        graphs_dir=str(graphs_dir),
        name_of_objects=name,
        name_label=NAME_LABEL,
        workload_metadata=_build_workload_metadata(name, settings),
        pod_group_parts=[] if settings.scheduler_name is None else parts,
        build_pod_metadata=lambda part: _build_pod_metadata(name, part, settings),
        build_variables=build_variables,
        environment=_build_environment(job, settings),
        resources=_build_resources(job, settings),
        config_dir=CONFIG_DIR,
        cache_dir=cache_dir,
        compile_command=_COMPILE_COMMAND,
        fetch_command=_FETCH_COMMAND,
        final_exit_codes=_NON_RETRYABLE_EXIT_CODES,
        compile_final_exit_codes=_NON_RETRYABLE_COMPILE_EXIT_CODES,
    )
    return [*yaml.safe_load_all(text)]


def build_pod_selector(job: JobSpec, settings: KubernetesLauncherConfig) -> str:
    """Return the label selector of a job's first pod, which has the log of the run."""
    name = build_object_name(job.name)
    if settings.kind is WorkloadType.JobSet:
        jobset, first = "jobset.sigs.k8s.io", "batch.kubernetes.io/job-completion-index=0"
        return f"{jobset}/jobset-name={name},{jobset}/replicatedjob-name=node,{first}"
    return f"training.kubeflow.org/job-name={name},training.kubeflow.org/replica-type=master"


def _build_workload_metadata(name: str, settings: KubernetesLauncherConfig) -> dict[str, Any]:
    """Return the metadata of the JobSet or PyTorchJob."""
    labels = {NAME_LABEL: "hlat"}
    if settings.queue is not None:
        labels[QUEUE_LABEL] = settings.queue
    metadata = {
        "name": name,
        "namespace": settings.namespace,
        "labels": labels | settings.labels,
    }
    return metadata | ({"annotations": settings.annotations} if settings.annotations else {})


def _build_pod_metadata(
    name: str, part: str, settings: KubernetesLauncherConfig
) -> dict[str, dict[str, str]]:
    """Return the metadata of the pods of a part; empty if there is none."""
    labels = settings.pod_labels
    if settings.scheduler_name is not None:
        labels = labels | {POD_GROUP_LABEL: f"{name}-{part}"}
    metadata = {"labels": labels, "annotations": settings.pod_annotations}
    return {key: values for key, values in metadata.items() if values}


def _build_environment(job: JobSpec, settings: KubernetesLauncherConfig) -> list[dict[str, Any]]:
    """Return the environment variables of a container, with references to Secrets last."""
    literals = job.environment | settings.env
    environment: list[dict[str, Any]] = [
        {"name": name, "value": _escape_variables(value)}
        for name, value in sorted(literals.items())
        if name not in settings.secret_env
    ]
    for variable, reference in sorted(settings.secret_env.items()):
        name, _, key = reference.partition("/")
        secret = {"secretKeyRef": {"name": name, "key": key}}
        environment.append({"name": variable, "valueFrom": secret})
    return environment


def _build_resources(job: JobSpec, settings: KubernetesLauncherConfig) -> dict[str, Any]:
    """Return the resources of a pod; empty if it requests none.

    A pod requests all accelerators and EFA interfaces of a known node type, so that it has the node
    exclusively.
    """
    limits: dict[str, Any] = {}
    if job.node_type is not None:
        limits = {
            _ACCELERATOR_RESOURCES[job.node_type.accelerator]: job.node_type.num_chips,
            _EFA_RESOURCE: job.node_type.num_efa_interfaces,
            "hugepages-2Mi": _HUGE_PAGES,
        }
        if job.host_memory_gib is not None:
            limits["memory"] = f"{math.floor(job.host_memory_gib * _MEMORY_FRACTION)}Gi"
    if settings.memory_gib is not None:
        limits["memory"] = f"{settings.memory_gib}Gi"
    requests = limits if settings.cpus is None else limits | {"cpu": settings.cpus}
    resources = {"limits": limits, "requests": requests}
    return {key: values for key, values in resources.items() if values}
