"""Validation of the Kubernetes launcher's settings before a manifest is written.

Messages about environment variables omit the values, which may be secrets.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hlat.config.bounds import find_bounds_violations
from hlat.config.config_errors import raise_config_errors
from hlat.config.run import Config
from hlat.distributed import rank_environment
from hlat.engine.neuron.neuron_environment import build_neuron_environment

from ._kubernetes_manifest import (
    NAME_LABEL,
    POD_GROUP_LABEL,
    QUEUE_LABEL,
    KubernetesLauncherConfig,
)

_LAUNCHER = "hydra.launcher"
_RESERVED_POD_FIELDS = {
    "containers",
    "initContainers",
    "nodeSelector",
    "restartPolicy",
    "terminationGracePeriodSeconds",
    "volumes",
}
"""Fields that the launcher sets."""
_RESERVED_VARIABLES = {
    rank_environment.NUM_NODES_ENV,
    rank_environment.NODE_RANK_ENV,
    rank_environment.RDZV_ENDPOINT_ENV,
    rank_environment.RECORDS_DIR_ENV,
    rank_environment.PARENT_PID_ENV,
    "JOB_COMPLETION_INDEX",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
"""Variables that hlat, the Job controller or the training operator sets in a pod."""
_RESERVED_LABELS = {
    "labels": {
        NAME_LABEL: "is set by the launcher; remove it",
        QUEUE_LABEL: f"is the queue; set {_LAUNCHER}.queue",
    },
    "pod_labels": {
        QUEUE_LABEL: f"is for the whole job, not for pods; set {_LAUNCHER}.queue",
        POD_GROUP_LABEL: f"is the pod group; set {_LAUNCHER}.scheduler_name",
    },
}
"""Labels by setting, each with the end of the message."""
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_VARIABLE_NAME = re.compile(r"(KEYS?|TOKEN|PASSWORDS?|SECRETS?)(_|$)", re.IGNORECASE)
"""Part of the name of a variable with a secret: WANDB_API_KEY, but not TOKENIZERS_PARALLELISM or
the count MAX_TOKENS."""
_PATH_VARIABLE_NAME = re.compile(r"_(FILE|PATH)$", re.IGNORECASE)
"""End of the name of a variable with a path, such as AWS_WEB_IDENTITY_TOKEN_FILE."""
_SUBDOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
"""RFC 1123 subdomain (Kubernetes documentation, object names and IDs)."""
_OBJECT_NAME = re.compile(rf"(?=.{{1,253}}$){_SUBDOMAIN}")
_SECRET_REFERENCE = re.compile(rf"(?=[^/]{{1,253}}/){_SUBDOMAIN}/[A-Za-z0-9._-]{{1,253}}")
_LABEL_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"((?=[^/]{{1,253}}/){_SUBDOMAIN}/)?{_LABEL_NAME}")
_LABEL_VALUE = re.compile(rf"({_LABEL_NAME})?")
"""Syntax of labels, whose keys are also those of annotations (Kubernetes documentation, labels and
selectors)."""


def validate_kubernetes_settings(settings: KubernetesLauncherConfig) -> None:
    """Raise ConfigError if the settings are invalid."""
    problems = [
        *find_bounds_violations(settings, f"{_LAUNCHER}."),
        *_find_pod_problems(settings),
        *_find_environment_problems(settings),
        *_find_metadata_problems(settings),
        *_find_scheduling_problems(settings),
    ]
    raise_config_errors(problems)


def validate_kubernetes_jobs(configs: Sequence[Config], settings: KubernetesLauncherConfig) -> None:
    """Raise ConfigError if the settings contradict the configuration of a run."""
    problems = [problem for config in configs for problem in _find_job_problems(config, settings)]
    raise_config_errors(dict.fromkeys(problems))


def _find_pod_problems(settings: KubernetesLauncherConfig) -> Iterator[str]:
    if settings.image is None:
        yield f"{_LAUNCHER}.image is not set; name an image with hlat and its dependencies"
    if not settings.mount.startswith("/"):
        yield f"{_LAUNCHER}.mount={settings.mount} is not an absolute path, such as /fsx"
    for key in sorted(_RESERVED_POD_FIELDS & settings.pod.keys()):
        yield f"{_LAUNCHER}.pod.{key} is set by the launcher; remove it"
    if settings.exclude and "affinity" in settings.pod:
        yield (
            f"{_LAUNCHER}.exclude sets pod.affinity, which {_LAUNCHER}.pod.affinity also sets; "
            "remove exclude and add a NotIn expression to every nodeSelectorTerm"
        )
    if settings.scheduler_name is not None and "schedulerName" in settings.pod:
        yield (
            f"{_LAUNCHER}.scheduler_name={settings.scheduler_name} and {_LAUNCHER}.pod."
            f"schedulerName={settings.pod['schedulerName']} are the same field; remove one"
        )


def _find_environment_problems(settings: KubernetesLauncherConfig) -> Iterator[str]:
    for setting in ("env", "secret_env"):
        for name, value in getattr(settings, setting).items():
            key = f"{_LAUNCHER}.{setting}.{name}"
            if not isinstance(value, str):
                yield f"{key} is a {type(value).__name__}; write a text"
            elif not _VARIABLE_NAME.fullmatch(name):
                yield f"{key} is not a name of a variable; use letters, digits and _"
            elif name in _RESERVED_VARIABLES:
                yield f"{key} is set in every pod; remove it"
            elif setting == "env" and _is_secret(name):
                yield (
                    f"{key} has the name of a secret, and the manifest would contain its value; "
                    f"create a Secret and set {_LAUNCHER}.secret_env.{name}=SECRET/KEY"
                )
            elif setting == "secret_env" and not _SECRET_REFERENCE.fullmatch(value):
                yield (
                    f"{key} is not of the form SECRET/KEY; name a Secret of the namespace and its "
                    "key, such as wandb/api-key"
                )
    for name in sorted(settings.env.keys() & settings.secret_env.keys()):
        yield f"{name} is in {_LAUNCHER}.env and in {_LAUNCHER}.secret_env; remove one"


def _is_secret(name: str) -> bool:
    """Return True if a variable with this name contains a secret."""
    is_path = _PATH_VARIABLE_NAME.search(name) is not None
    return _SECRET_VARIABLE_NAME.search(name) is not None and not is_path


def _find_metadata_problems(settings: KubernetesLauncherConfig) -> Iterator[str]:
    for setting in ("labels", "annotations", "pod_labels", "pod_annotations"):
        values: Mapping[str, Any] = getattr(settings, setting)
        reserved = _RESERVED_LABELS.get(setting, {})
        for name, value in values.items():
            key = f"{_LAUNCHER}.{setting}.{name}"
            if not isinstance(value, str):
                yield (
                    f"{key} is a {type(value).__name__}; write a text, and a key with dots as "
                    f"'{_LAUNCHER}.{setting}={{example.com/team: nlp}}'"
                )
            elif not _LABEL_KEY.fullmatch(name):
                yield f"{key} is not a key of a label or annotation, such as example.com/team"
            elif name in reserved:
                yield f"{key} {reserved[name]}"
            elif setting.endswith("labels") and not _LABEL_VALUE.fullmatch(value):
                yield (
                    f"{key}={value} is not a value of a label; use at most 63 letters, digits and "
                    "-_. with a letter or digit at both ends, or set an annotation"
                )


def _find_scheduling_problems(settings: KubernetesLauncherConfig) -> Iterator[str]:
    queue, scheduler = settings.queue, settings.scheduler_name
    if queue is not None and not (_OBJECT_NAME.fullmatch(queue) and len(queue) <= 63):
        yield (
            f"{_LAUNCHER}.queue={queue} is not a name of a LocalQueue; list them with: kubectl get "
            f"localqueues --namespace {settings.namespace}"
        )
    if scheduler is not None and not scheduler.strip():
        yield (
            f"{_LAUNCHER}.scheduler_name={scheduler!r} is empty; name a scheduler with the "
            "coscheduling plugin, or set null"
        )
    for i, node in enumerate(settings.exclude):
        if not node or not _LABEL_VALUE.fullmatch(node):
            yield (
                f"{_LAUNCHER}.exclude.{i}={node} is not a value of the label "
                "kubernetes.io/hostname; list them with: kubectl get nodes --label-columns "
                "kubernetes.io/hostname"
            )


def _find_job_problems(config: Config, settings: KubernetesLauncherConfig) -> Iterator[str]:
    derived = build_neuron_environment(config.compiler, config.precision)
    for setting in ("env", "secret_env"):
        for name in sorted(derived.keys() & getattr(settings, setting).keys()):
            yield (
                f"{_LAUNCHER}.{setting}.{name} would override a variable of compiler={{...}} or "
                "precision={...}; set it there"
            )
    hardware = config.hardware
    for setting, field, capacity in (
        ("cpus", "vcpus", hardware.vcpus),
        ("memory_gib", "host_memory_gib", hardware.host_memory_gib),
    ):
        requested = getattr(settings, setting)
        if requested is not None and capacity is not None and requested > capacity:
            yield (
                f"{_LAUNCHER}.{setting}={requested} exceeds hardware.{field}={capacity:g} of "
                f"hardware={hardware.name}, so no node has enough; request less"
            )
