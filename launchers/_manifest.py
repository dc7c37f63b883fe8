"""What Kubernetes is told of a job, as the data of a manifest.

A pod is a node of the job: it asks for all accelerators of one, so that no two share it. What it
trains comes with it in a ConfigMap, the program with its image, the text and the run's folder with
a volume that all pods share.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hlat import compiler_cache
from hlat.config import frozen
from hlat.config.errors import ConfigError, Exit
from hlat.engine import processes

from ._job import Accelerator, Job
from ._points import Pruning


class Kind(Enum):
    """What runs the pods together."""

    JobSet = "JobSet"
    """JobSet of Kubernetes SIGs: starts all pods again where one fails."""
    PyTorchJob = "PyTorchJob"
    """PyTorchJob of Kubeflow's training operator: starts single pods again."""


@dataclass
class Settings(Pruning):
    """What a manifest says that a run does not."""

    image: str | None = None
    """Image that has hlat and what it runs on; without one nothing is sent."""
    kind: Kind = Kind.JobSet
    """JobSet or PyTorchJob."""
    namespace: str = "default"
    """Where it runs."""
    claim: str = "fsx"
    """Claim of the volume that all pods share, such as one of FSx for Lustre."""
    mount: str = "/fsx"
    """Where pods have it; relative paths of the configuration mean folders below."""
    max_attempts: int = 100
    """Times that the pods may be started (HLAT's own agent: 100)."""
    precompile: bool = True
    """Compile what engine=nxd executes on Trainium in pods before; a PyTorchJob has none."""
    grace_s: int = 300
    """Between a pod's being asked to end and its being killed; more than a save takes."""
    pod: dict[str, Any] = field(default_factory=dict)
    """Further fields of the pods' specification, such as tolerations."""


FOLDER = "/etc/hlat"
"""Where pods have the configuration."""
COMMAND = ("python", "-m", "hlat.train", frozen.FLAG, FOLDER)
_COMPILE = ("python", "-m", "hlat.precompile", frozen.FLAG, FOLDER)
_FETCH = ("python", "-m", "hlat.precompile", "merge")
_OWNED = {
    *(
        "containers",
        "initContainers",
        "nodeSelector",
        "restartPolicy",
        "terminationGracePeriodSeconds",
        "volumes",
    )
}
"""Fields of a pod that hydra.launcher.pod cannot set."""
_PORT = 41000
"""Where the first pod's supervisor listens (HLAT's MASTER_PORT); each pod has its own address."""
_RESOURCES = {Accelerator.neuron: "aws.amazon.com/neuron", Accelerator.gpu: "nvidia.com/gpu"}
_EFA, _HUGE_PAGES = "vpc.amazonaws.com/efa", "5120Mi"
"""EFA's interfaces as pods ask for them, and the huge pages that libfabric wants for these (Amazon
EKS user guide, machine learning training with EFA)."""
_MEMORY_SHARE = 0.8
"""Of the node's memory; the rest is the system's and the daemons'."""
_NEVER_AGAIN = [int(code) for code in (Exit.CONFIGURATION, Exit.DIVERGED, Exit.UNHEALTHY_NODE)]
"""The last because pods would meet the same node again: Kubernetes must be told to avoid it."""
_NOT_COMPILED = [int(code) for code in (Exit.FAILED, Exit.CONFIGURATION)]
"""As another attempt would end alike."""
_LONGEST_NAME = 41
"""Of objects: pods append -compile-0-<number>-<5 characters> to it, and may have 63 characters."""


def name_of(run: str) -> str:
    """Return the name of a run's objects: a DNS label, and another one for every run."""
    label = re.sub(r"[^a-z0-9]+", "-", f"hlat-{run}".lower()).strip("-")
    if label == f"hlat-{run}" and len(label) <= _LONGEST_NAME:
        return label
    digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    return f"{label[: _LONGEST_NAME - 9].rstrip('-')}-{digest}"


def manifest(
    job: Job,
    host_memory_gib: float | None,
    files: dict[str, str],
    settings: Settings,
    compiled: Path | None = None,
) -> list[dict[str, Any]]:
    """Return the documents of a job, in the order in which they are to be created.

    Args:
        job: Of a run it runs COMMAND.
        host_memory_gib: Of a node; None where that is not known.
        files: What is to lie in FOLDER: text by name; of an evaluation there is none.
        settings: Everything else; `refuse_settings` has looked at them.
        compiled: Where compiled graphs lie that a JobSet is to make before; None: nowhere.
    """
    name = name_of(job.name)
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": settings.namespace,
        "labels": {"app.kubernetes.io/name": "hlat"},
    }
    configuration = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}
    if settings.kind is Kind.JobSet:
        kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        spec = _jobset(job, host_memory_gib, name, settings, compiled)
    else:
        kind = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}
        spec = _pytorch_job(job, host_memory_gib, name, settings)
    work = {**kind, "metadata": metadata, "spec": spec}
    return [configuration, work] if files else [work]


def refuse_settings(settings: Settings) -> None:
    """Return if a manifest can be made of the settings.

    Raises:
        ConfigError: It cannot.
    """
    problems = []
    if settings.image is None:
        problems.append(
            "hydra.launcher.image is not set; name the image that has hlat and what it runs on"
        )
    for key, least in (("max_attempts", 1), ("grace_s", 0)):
        if (number := getattr(settings, key)) < least:
            problems.append(f"hydra.launcher.{key}={number} is too small; use {least} or more")
    if not settings.mount.startswith("/"):
        problems.append(f"hydra.launcher.mount={settings.mount} is no absolute path, such as /fsx")
    for key in sorted(_OWNED & settings.pod.keys()):
        problems.append(f"hydra.launcher.pod.{key} is set by the launcher; leave it out")
    if problems:
        raise ConfigError(*problems)


def pods(job: Job, settings: Settings) -> str:
    """Return the selector of a job's first pod, whose log tells what the run says."""
    name = name_of(job.name)
    if settings.kind is Kind.JobSet:
        jobset, first = "jobset.sigs.k8s.io", "batch.kubernetes.io/job-completion-index=0"
        return f"{jobset}/jobset-name={name},{jobset}/replicatedjob-name=node,{first}"
    return f"training.kubeflow.org/job-name={name},training.kubeflow.org/replica-type=master"


def _jobset(
    job: Job, memory: float | None, name: str, settings: Settings, compiled: Path | None
) -> dict[str, Any]:
    """A JobSet of one indexed Job, or of two: any pod's failure starts all of them again."""

    def pods_of(part: str, container: str, command: Sequence[str]) -> dict[str, Any]:
        words = _words(job, command, "JOB_COMPLETION_INDEX", f"{name}-{part}-0-0.{name}")
        return _pod(job, memory, container, words, name, settings)

    node = _replicated("node", job.nodes, pods_of("node", job.entry, job.command), _NEVER_AGAIN)
    parts = [node]
    if compiled is not None:
        compiling = pods_of("compile", "compile", _COMPILE)
        _keep_compiled(job, compiling)
        pod = node["template"]["spec"]["template"]["spec"]
        _keep_compiled(job, pod)
        (train,) = pod["containers"]
        fetch = {key: value for key, value in train.items() if key != "resources"}
        fetch |= {"name": "fetch", "command": [*_FETCH, _verbatim(str(compiled))]}
        pod["initContainers"] = [fetch]
        node["dependsOn"] = [{"name": "compile", "status": "Complete"}]
        parts.insert(0, _replicated("compile", job.nodes, compiling, _NOT_COMPILED))
    never_again = {
        "name": "never_again",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "failurePolicy": {"maxRestarts": settings.max_attempts - 1, "rules": [never_again]},
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": parts,
    }


def _replicated(
    name: str, nodes: int, pod: dict[str, Any], never_again: list[int]
) -> dict[str, Any]:
    """An indexed Job with a pod for each node; some exit codes of its container end it for good."""
    container = pod["containers"][0]["name"]
    codes = {"containerName": container, "operator": "In", "values": never_again}
    indexed_job = {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    return {"name": name, "replicas": 1, "template": {"spec": indexed_job}}


def _keep_compiled(job: Job, pod: dict[str, Any]) -> None:
    """Give the containers of a pod one folder for compiled graphs, where the compiler looks."""
    where = str(compiler_cache.location(job.environment))
    pod["volumes"].append({"name": "compiled", "emptyDir": {}})
    for container in pod["containers"]:
        container["volumeMounts"].append({"name": "compiled", "mountPath": where})


def _pytorch_job(job: Job, memory: float | None, name: str, settings: Settings) -> dict[str, Any]:
    """A PyTorchJob, its first pod the master; a pod that a signal has ended is started again."""
    words = _words(job, job.command, "RANK", f"{name}-master-0")
    template = {"spec": _pod(job, memory, "pytorch", words, name, settings)}
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    return {
        "runPolicy": {"backoffLimit": settings.max_attempts, "cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "ExitCode", "template": template}
            for role, count in replicas.items()
            if count
        },
    }


def _words(job: Job, command: Sequence[str], index: str, first: str) -> list[str]:
    """A command, with what tells a pod which node of the job it is; Kubernetes fills in `index`.

    It is a word of `env`, since a variable's value can refer to none that an operator appends.
    """
    place = (
        f"{processes.NODES}={job.nodes}",
        f"{processes.NODE}=$({index})",
        f"{processes.MEETING}={first}:{_PORT}",
    )
    return ["env", *place, *map(_verbatim, command)]


def _verbatim(text: str) -> str:
    """Text in which Kubernetes finds no `$(NAME)` to replace."""
    return text.replace("$", "$$")


def _pod(
    job: Job, memory: float | None, container: str, words: list[str], name: str, settings: Settings
) -> dict[str, Any]:
    """The specification of a pod; what an evaluation does is in its command alone."""
    composed = [{"name": "configuration"}] if job.entry == "train" else []
    found: dict[str, Any] = {
        "terminationGracePeriodSeconds": settings.grace_s,
        "containers": [
            {
                "name": container,
                "image": settings.image,
                "command": words,
                "workingDir": settings.mount,
                "env": [
                    {"name": variable, "value": _verbatim(value)}
                    for variable, value in sorted(job.environment.items())
                ],
                "resources": _resources(job, memory),
                "volumeMounts": [
                    {"name": "shared", "mountPath": settings.mount},
                    {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 (where pods have it)
                    *({**volume, "mountPath": FOLDER, "readOnly": True} for volume in composed),
                ],
            }
        ],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *({**volume, "configMap": {"name": name}} for volume in composed),
        ],
    }
    if job.kind is not None:
        found["nodeSelector"] = {"node.kubernetes.io/instance-type": job.hardware}
    assert not found.keys() & settings.pod.keys(), "refuse_settings looked at these"
    return found | settings.pod


def _resources(job: Job, memory: float | None) -> dict[str, Any]:
    """All that a node has, so that a pod has it for itself; nothing where that is not known."""
    if job.kind is None:
        return {}
    limits: dict[str, Any] = {
        _RESOURCES[job.kind.accelerator]: job.kind.chips,
        _EFA: job.kind.efa,
        "hugepages-2Mi": _HUGE_PAGES,
    }
    if memory is not None:
        limits["memory"] = f"{math.floor(memory * _MEMORY_SHARE)}Gi"
    return {"limits": limits, "requests": limits}
