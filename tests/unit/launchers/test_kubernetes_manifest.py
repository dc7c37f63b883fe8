"""Each setting of the Kubernetes launcher changes its part of the manifest, or is rejected."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hlat.config import compose as composition
from hlat.config.compiler import CompilerConfig
from hlat.config.config_errors import ConfigError
from hlat.config.hardware import HardwareConfig

composition.register_configs()
from hydra_plugins.hlat_launchers._job_spec import (  # noqa: E402 (registered above)
    NODE_TYPES,
    JobSpec,
)
from hydra_plugins.hlat_launchers.kubernetes._kubernetes_manifest import (  # noqa: E402
    KubernetesLauncherConfig,
    WorkloadType,
    build_manifest,
)
from hydra_plugins.hlat_launchers.kubernetes._kubernetes_validation import (  # noqa: E402
    validate_kubernetes_jobs,
    validate_kubernetes_settings,
)

CANARY = "canary-5f2d9c"
KINDS = pytest.mark.parametrize("kind", [*WorkloadType])
JOB = JobSpec(
    name="x",
    run_dir=Path("/fsx/runs/x"),
    working_directory=Path("/fsx"),
    instance_type="trn1.32xlarge",
    node_type=NODE_TYPES["trn1.32xlarge"],
    num_nodes=2,
    command=("python", "-m", "hlat.train"),
    environment={"FI_PROVIDER": "efa", "PYTHONUNBUFFERED": "1"},
    host_memory_gib=512,
)
UNKNOWN_NODE = replace(JOB, instance_type="cpu", node_type=None, host_memory_gib=None)


def build(kind: WorkloadType = WorkloadType.JobSet, job: JobSpec = JOB, **settings: Any) -> Any:
    """Return the documents of a job without compilation."""
    config = KubernetesLauncherConfig(image="x:1", kind=kind, **settings)
    validate_kubernetes_settings(config)
    return build_manifest(job, {}, config)


def find_pod_templates(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod templates of a JobSet or PyTorchJob."""
    spec = workload["spec"]
    if workload["kind"] == "JobSet":
        return [part["template"]["spec"]["template"] for part in spec["replicatedJobs"]]
    return [replicas["template"] for replicas in spec["pytorchReplicaSpecs"].values()]


def find_containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the main containers of all pod templates."""
    return [template["spec"]["containers"][0] for template in find_pod_templates(workload)]


@KINDS
def test_defaults_add_no_field(kind):
    (workload,) = build(kind)
    assert workload["metadata"] == {
        "name": "hlat-x",
        "namespace": "default",
        "labels": {"app.kubernetes.io/name": "hlat"},
    }
    assert "ttlSecondsAfterFinished" not in str(workload)
    for template in find_pod_templates(workload):
        assert "metadata" not in template
        assert not template["spec"].keys() & {"affinity", "schedulerName"}
    for container in find_containers(workload):
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert "cpu" not in container["resources"]["requests"]


@KINDS
def test_variables_of_settings_override_those_of_the_instance_type(kind):
    (workload,) = build(kind, env={"FI_PROVIDER": "tcp", "A": "$(HOME) $HOME", "_": ""})
    for container in find_containers(workload):
        assert container["env"] == [
            {"name": "A", "value": "$$(HOME) $$HOME"},
            {"name": "FI_PROVIDER", "value": "tcp"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "_", "value": ""},
        ]


@KINDS
def test_secret_variables_refer_to_secrets(kind):
    secrets = {"WANDB_API_KEY": "wandb/api-key", "FI_PROVIDER": "a.b/C.d_e"}
    (workload,) = build(kind, secret_env=secrets)
    for container in find_containers(workload):
        assert container["env"] == [
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "FI_PROVIDER", "valueFrom": {"secretKeyRef": {"name": "a.b", "key": "C.d_e"}}},
            {
                "name": "WANDB_API_KEY",
                "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api-key"}},
            },
        ]


def test_variables_reach_the_pods_of_the_compilation():
    config = KubernetesLauncherConfig(
        image="x:1", env={"A": "b"}, secret_env={"HF_TOKEN": "hf/token"}
    )
    (workload,) = build_manifest(JOB, {}, config, Path("/fsx/runs/.compiled"))
    compiles, trains = (template["spec"] for template in find_pod_templates(workload))
    containers = [*compiles["containers"], *trains["containers"], *trains["initContainers"]]
    assert [container["name"] for container in containers] == ["compile", "train", "fetch"]
    for container in containers:
        assert {"A", "HF_TOKEN"} <= {entry["name"] for entry in container["env"]}


def test_compiled_graphs_are_in_the_cache_directory_of_the_settings():
    config = KubernetesLauncherConfig(image="x:1", env={"NEURON_COMPILE_CACHE_URL": "/local/cache"})
    (workload,) = build_manifest(JOB, {}, config, Path("/fsx/runs/.compiled"))
    for container in find_containers(workload):
        assert {"name": "compiled", "mountPath": "/local/cache"} in container["volumeMounts"]


@KINDS
def test_labels_and_annotations_of_workload_and_pods(kind):
    (workload,) = build(
        kind,
        labels={"example.com/team": "nlp"},
        annotations={"example.com/note": "any text: $x"},
        pod_labels={"cost-center": "7"},
        pod_annotations={"sidecar.istio.io/inject": "false"},
    )
    assert workload["metadata"]["labels"] == {
        "app.kubernetes.io/name": "hlat",
        "example.com/team": "nlp",
    }
    assert workload["metadata"]["annotations"] == {"example.com/note": "any text: $x"}
    for template in find_pod_templates(workload):
        assert template["metadata"] == {
            "labels": {"cost-center": "7"},
            "annotations": {"sidecar.istio.io/inject": "false"},
        }


@KINDS
def test_queue_is_a_label_of_the_workload_only(kind):
    (workload,) = build(kind, queue="user-queue")
    assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "user-queue"
    assert "suspend" not in str(workload)  # Kueue's webhook suspends it
    assert not any("metadata" in template for template in find_pod_templates(workload))


@KINDS
def test_scheduler_schedules_all_pods_of_a_part_together(kind):
    group, workload = build(kind, scheduler_name="scheduler-plugins-scheduler", namespace="ml")
    assert group == {
        "apiVersion": "scheduling.x-k8s.io/v1alpha1",
        "kind": "PodGroup",
        "metadata": {
            "name": "hlat-x-node",
            "namespace": "ml",
            "labels": {"app.kubernetes.io/name": "hlat"},
        },
        "spec": {"minMember": 2},
    }
    for template in find_pod_templates(workload):
        assert template["spec"]["schedulerName"] == "scheduler-plugins-scheduler"
        label = {"scheduling.x-k8s.io/pod-group": "hlat-x-node"}
        assert template["metadata"] == {"labels": label}


def test_compilation_has_a_separate_pod_group():
    config = KubernetesLauncherConfig(
        image="x:1", scheduler_name="gang", pod_labels={"team": "nlp"}
    )
    *groups, workload = build_manifest(JOB, {}, config, Path("/fsx/runs/.compiled"))
    names = [group["metadata"]["name"] for group in groups]
    assert names == ["hlat-x-compile", "hlat-x-node"]
    assert [template["metadata"]["labels"] for template in find_pod_templates(workload)] == [
        {"team": "nlp", "scheduling.x-k8s.io/pod-group": name} for name in names
    ]


@KINDS
def test_cpus_are_a_request_and_memory_is_a_limit_too(kind):
    (workload,) = build(kind, cpus=120, memory_gib=480)
    for container in find_containers(workload):
        limits = {
            "aws.amazon.com/neuron": 16,
            "vpc.amazonaws.com/efa": 8,
            "hugepages-2Mi": "5120Mi",
            "memory": "480Gi",
        }
        assert container["resources"] == {"limits": limits, "requests": limits | {"cpu": 120}}


@pytest.mark.parametrize(
    ("settings", "resources"),
    [
        ({}, {}),
        ({"cpus": 4}, {"requests": {"cpu": 4}}),
        ({"memory_gib": 8}, {"limits": {"memory": "8Gi"}, "requests": {"memory": "8Gi"}}),
    ],
)
def test_resources_without_a_known_instance_type(settings, resources):
    (workload,) = build(job=UNKNOWN_NODE, **settings)
    (container,) = find_containers(workload)
    assert container["resources"] == resources


@pytest.mark.parametrize(
    ("kind", "section"),
    [(WorkloadType.JobSet, None), (WorkloadType.PyTorchJob, "runPolicy")],
)
@pytest.mark.parametrize("ttl_s", [0, 3600])
def test_time_to_live_after_the_end(kind, section, ttl_s):
    (workload,) = build(kind, ttl_s=ttl_s)
    spec = workload["spec"] if section is None else workload["spec"][section]
    assert spec["ttlSecondsAfterFinished"] == ttl_s


@KINDS
def test_excluded_nodes_get_no_pod(kind):
    nodes = ["ip-10-0-0-1.ec2.internal", "trn-7"]
    (workload,) = build(kind, exclude=nodes)
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": nodes}
    for template in find_pod_templates(workload):
        assert template["spec"]["affinity"] == {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [expression]}]
                }
            }
        }
        assert template["spec"]["nodeSelector"] == {
            "node.kubernetes.io/instance-type": "trn1.32xlarge"
        }


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "SECRET", "TOKEN_2"),
        *("wandb_api_key", "APIKEY", "PGPASSWORD", "AWS_KEYS", "DB_SECRETS", "PASSWORDS"),
    ],
)
def test_refuse_a_literal_secret_without_its_value(name):
    with pytest.raises(ConfigError) as refused:
        build(env={name: CANARY})
    (problem,) = refused.value.problems
    assert problem.startswith(f"hydra.launcher.env.{name} has the name of a secret")
    assert problem.endswith(f"set hydra.launcher.secret_env.{name}=SECRET/KEY")
    assert CANARY not in problem


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYBOARD", "HF_TOKEN_PATH", "SECRETARY"),
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    ],
)
def test_accept_a_literal_without_the_name_of_a_secret(name):
    (workload,) = build(env={name: "x"})
    (container,) = find_containers(workload)
    assert {"name": name, "value": "x"} in container["env"]


@pytest.mark.parametrize(
    "value",
    [
        *(CANARY, f"{CANARY}/", f"/{CANARY}", f"a/{CANARY}/b", f"A{CANARY}/b", f"-{CANARY}/b"),
        *(f"a/{CANARY}$", f"{'x' * 254}/{CANARY}", "", f"a..{CANARY}/b"),
    ],
)
def test_refuse_a_malformed_reference_without_its_value(value):
    with pytest.raises(ConfigError) as refused:
        build(secret_env={"WANDB_API_KEY": value})
    (problem,) = refused.value.problems
    assert "hydra.launcher.secret_env.WANDB_API_KEY is not of the form SECRET/KEY" in problem
    assert CANARY not in problem


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"env": {"1A": "x"}}, "hydra.launcher.env.1A is not a name of a variable"),
        ({"secret_env": {"A-B": "a/b"}}, "hydra.launcher.secret_env.A-B is not a name of"),
        ({"env": {"A": ["x"]}}, "hydra.launcher.env.A is a list; write a text"),
        ({"env": {"RANK": "0"}}, "hydra.launcher.env.RANK is set in every pod; remove it"),
        ({"env": {"HLAT_NODES": "0"}}, "hydra.launcher.env.HLAT_NODES is set in every pod"),
        (
            {"secret_env": {"JOB_COMPLETION_INDEX": "a/b"}},
            "hydra.launcher.secret_env.JOB_COMPLETION_INDEX is set in every pod",
        ),
        (
            {"env": {"A": "x"}, "secret_env": {"A": "a/b"}},
            "A is in hydra.launcher.env and in hydra.launcher.secret_env; remove one",
        ),
        ({"labels": {"-a": "x"}}, "hydra.launcher.labels.-a is not a key of a label"),
        ({"annotations": {"a/b/c": "x"}}, "hydra.launcher.annotations.a/b/c is not a key"),
        ({"labels": {"a": "b c"}}, "hydra.launcher.labels.a=b c is not a value of a label"),
        ({"pod_labels": {"a": "x" * 64}}, "is not a value of a label; use at most 63"),
        ({"pod_annotations": {"a": {"b": "c"}}}, "hydra.launcher.pod_annotations.a is a dict"),
        (
            {"labels": {"app.kubernetes.io/name": "x"}},
            "hydra.launcher.labels.app.kubernetes.io/name is set by the launcher; remove it",
        ),
        (
            {"labels": {"kueue.x-k8s.io/queue-name": "x"}},
            "kueue.x-k8s.io/queue-name is the queue; set hydra.launcher.queue",
        ),
        (
            {"pod_labels": {"kueue.x-k8s.io/queue-name": "x"}},
            "is for the whole job, not for pods; set hydra.launcher.queue",
        ),
        (
            {"pod_labels": {"scheduling.x-k8s.io/pod-group": "x"}},
            "is the pod group; set hydra.launcher.scheduler_name",
        ),
        ({"queue": "User_Queue"}, "hydra.launcher.queue=User_Queue is not a name of a LocalQueue"),
        ({"queue": "x" * 64}, "kubectl get localqueues --namespace default"),
        ({"scheduler_name": ""}, "hydra.launcher.scheduler_name='' is empty; name a scheduler"),
        (
            {"scheduler_name": "a", "pod": {"schedulerName": "b"}},
            "hydra.launcher.scheduler_name=a and hydra.launcher.pod.schedulerName=b are the same",
        ),
        ({"cpus": 0}, "hydra.launcher.cpus=0 is too small; use 1 or more"),
        ({"memory_gib": 0}, "hydra.launcher.memory_gib=0 is too small; use 1 or more"),
        ({"ttl_s": -1}, "hydra.launcher.ttl_s=-1 is too small; use 0 or more"),
        ({"exclude": ["a", "b c"]}, "hydra.launcher.exclude.1=b c is not a value of the label"),
        ({"exclude": [""]}, "hydra.launcher.exclude.0= is not a value of the label"),
        (
            {"exclude": ["a"], "pod": {"affinity": {}}},
            "hydra.launcher.exclude sets pod.affinity, which hydra.launcher.pod.affinity also sets",
        ),
    ],
)
def test_refuse_a_setting(settings, problem):
    with pytest.raises(ConfigError) as refused:
        build(**settings)
    assert problem in str(refused.value)


def test_report_all_problems_at_once():
    settings = {"env": {"A_KEY": "x"}, "labels": {"a": "b c"}, "exclude": ["b c"], "cpus": 0}
    with pytest.raises(ConfigError) as refused:
        build(**settings)
    assert len(refused.value.problems) == 4


def config_of(**hardware: Any) -> Any:
    """Return the parts of a configuration that the validation of a job reads."""
    compiler = CompilerConfig(name="x", neuron_sdk="2.28", environment={"NEURON_FUSE_SOFTMAX": "1"})
    precision = SimpleNamespace(rounding=None, compute=None)
    return SimpleNamespace(
        compiler=compiler,
        precision=precision,
        hardware=HardwareConfig(name="trn1.32xlarge", **hardware),
    )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"env": {"NEURON_FUSE_SOFTMAX": "0"}},
            "hydra.launcher.env.NEURON_FUSE_SOFTMAX would override a variable of compiler=",
        ),
        (
            {"secret_env": {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "a/b"}},
            "hydra.launcher.secret_env.NEURON_RT_STOCHASTIC_ROUNDING_EN would override",
        ),
        (
            {"cpus": 129},
            "hydra.launcher.cpus=129 exceeds hardware.vcpus=128 of hardware=trn1.32xlarge",
        ),
        (
            {"memory_gib": 513},
            "hydra.launcher.memory_gib=513 exceeds hardware.host_memory_gib=512 of hardware=",
        ),
    ],
)
def test_refuse_a_setting_that_contradicts_the_run(settings, problem):
    config = config_of(vcpus=128, host_memory_gib=512.0)
    with pytest.raises(ConfigError) as refused:
        validate_kubernetes_jobs([config, config], KubernetesLauncherConfig(**settings))
    (only,) = refused.value.problems
    assert problem in only


def test_accept_settings_of_unknown_hardware():
    settings = KubernetesLauncherConfig(env={"A": "b"}, cpus=10**6, memory_gib=10**6)
    validate_kubernetes_jobs([config_of()], settings)
