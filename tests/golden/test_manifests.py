"""Kubernetes manifests of the paper's 70B run on every node type, and of its evaluation."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.command_job import CommandJob
from hlat.config.compose import import_launcher_module

GOLDEN = Path(__file__).parent / "manifests"
SDK = {"trn1_32xl": "neuron_2_28", "trn1n_32xl": "neuron_2_31", "trn2_48xl": "neuron_2_33"}
SDK["trn2u_48xl"] = "neuron_2_31"
GPUS = ("a100_p4d", "h100_p5", "h200_p5e", "h200_p5en")
RECORDS = {
    **{f"{h}_JobSet": (h, "JobSet") for h in (*SDK, *GPUS, "cpu")},
    **{f"{h}_PyTorchJob": (h, "PyTorchJob") for h in ("trn1_32xl", "h100_p5")},
}

SETTINGS = {
    "env": {"NCCL_DEBUG": "INFO"},
    "secret_env": {"WANDB_API_KEY": "wandb/api-key"},
    "labels": {"kueue.x-k8s.io/priority-class": "high"},
    "annotations": {"example.com/contact": "team@example.com"},
    "pod_labels": {"example.com/team": "nlp"},
    "pod_annotations": {"sidecar.istio.io/inject": "false"},
    "queue": "user-queue",
    "scheduler_name": "scheduler-plugins-scheduler",
    "cpus": 96,
    "memory_gib": 384,
    "exclude": ["ip-10-0-0-1.ec2.internal", "ip-10-0-0-2.ec2.internal"],
    "ttl_s": 86400,
}
"""Every setting that the records above leave at its default."""
SETTINGS_RECORDS = {
    "settings_JobSet": ("trn1_32xl", "JobSet"),
    "settings_PyTorchJob": ("h100_p5", "PyTorchJob"),
}
EVALUATIONS = {f"evaluation_{kind}": kind for kind in ("JobSet", "PyTorchJob")}
EVALUATIONS["average_JobSet"] = "JobSet"


@pytest.mark.parametrize("record", [*RECORDS, *SETTINGS_RECORDS])
@pytest.mark.slow_after(4)
def test_manifest_is_as_recorded(record, compose, pytestconfig):
    hardware, kind = (RECORDS | SETTINGS_RECORDS)[record]
    sdk = SDK.get(hardware, "none")
    overrides = ("model=70b", f"hardware={hardware}", "hardware.nodes=4", f"compiler={sdk}")
    engine = "nxd" if hardware == "trn1_32xl" else "native"
    config = OmegaConf.to_object(compose("run.name=hlat_70b", *overrides, f"engine={engine}"))
    manifest, jobs = (
        import_launcher_module("kubernetes._kubernetes_manifest"),
        import_launcher_module("_job_spec"),
    )
    settings = manifest.KubernetesLauncherConfig(
        image="registry.example/hlat:1",
        kind=manifest.WorkloadType[kind],
        **(SETTINGS if record in SETTINGS_RECORDS else {}),
    )
    import_launcher_module("kubernetes._kubernetes_validation").validate_kubernetes_settings(
        settings
    )
    job = jobs.build_job(config, manifest.TRAIN_COMMAND, Path(settings.mount))
    files = {"config.yaml": "as composed\n", "words.json": "{}\n"}
    graphs_dir = jobs.get_compiled_graphs_dir(config, job.working_directory)
    documents = manifest.build_manifest(job, files, settings, graphs_dir)
    now = import_launcher_module("_yaml_writer").format_yaml(*documents)
    file = GOLDEN / f"{record}.yaml"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{record} changed; if meant: pytest tests/golden --update"


@pytest.mark.parametrize("record", EVALUATIONS)
def test_manifest_of_an_evaluation_is_as_recorded(record, compose, pytestconfig):
    chosen = ("run.name=evaluations", "hardware=h100_p5", "parallelism.tp=8")
    config = OmegaConf.to_object(compose(*chosen))
    arguments = ("runs/hlat_70b", "tasks=hlat_table2", "follow=true")
    command, name = "evaluate", "hlat_table2-1a2b3c4d"
    if record.startswith("average"):
        arguments, command, name = ("runs/hlat_70b", "last=2"), "average", "average-1a2b3c4d"
    command_job = CommandJob(
        command, name, arguments[0], Path(arguments[0], "jobs", name), arguments, config
    )
    documents = import_launcher_module("kubernetes._kubernetes_launcher").build_command_manifest(
        command_job,
        import_launcher_module("kubernetes._kubernetes_manifest").KubernetesLauncherConfig(
            image="registry.example/hlat:1",
            kind=import_launcher_module("kubernetes._kubernetes_manifest").WorkloadType[
                EVALUATIONS[record]
            ],
        ),
    )
    now = import_launcher_module("_yaml_writer").format_yaml(*documents)
    file = GOLDEN / f"{record}.yaml"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{record} changed; if meant: pytest tests/golden --update"


def test_every_record_is_compared():
    records = {file.stem for file in GOLDEN.glob("*.yaml")}
    assert records == RECORDS.keys() | SETTINGS_RECORDS.keys() | EVALUATIONS.keys()
