"""What Kubernetes is told of the paper's 70B run on every kind of node, and of its evaluation."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.compose import import_launcher_module
from hlat.jobs.evaluation_job import EvaluationJob

GOLDEN = Path(__file__).parent / "manifests"
SDK = {"trn1_32xl": "neuron_2_28", "trn1n_32xl": "neuron_2_31", "trn2_48xl": "neuron_2_33"}
RECORDS = {
    **{f"{h}_JobSet": (h, "JobSet") for h in (*SDK, "a100_p4d", "h100_p5", "cpu")},
    **{f"{h}_PyTorchJob": (h, "PyTorchJob") for h in ("trn1_32xl", "h100_p5")},
}

EVALUATIONS = {f"evaluation_{kind}": kind for kind in ("JobSet", "PyTorchJob")}


@pytest.mark.parametrize("record", RECORDS)
def test_manifest_is_as_recorded(record, compose, pytestconfig):
    hardware, kind = RECORDS[record]
    sdk = SDK.get(hardware, "none")
    words = ("model=70b", f"hardware={hardware}", "hardware.nodes=4", f"compiler={sdk}")
    engine = "nxd" if hardware == "trn1_32xl" else "native"
    config = OmegaConf.to_object(compose("run.name=hlat_70b", *words, f"engine={engine}"))
    manifest, jobs = (
        import_launcher_module("kubernetes._kubernetes_manifest"),
        import_launcher_module("_job_spec"),
    )
    settings = manifest.KubernetesLauncherConfig(
        image="registry.example/hlat:1", kind=manifest.WorkloadType[kind]
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
    words = ("runs/hlat_70b", "tasks=hlat_table2", "follow=true")
    asked = EvaluationJob("hlat_table2-1a2b3c4d", words[0], Path(words[0]), words, config)
    documents = import_launcher_module("kubernetes._kubernetes_launcher").build_evaluation_manifest(
        asked,
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
    assert records == RECORDS.keys() | EVALUATIONS.keys()
