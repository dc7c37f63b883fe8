"""What Kubernetes is told of the paper's 70B run on every kind of node, and of its evaluation."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.compose import launcher_module
from hlat.jobs.evaluation import Evaluation

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
    manifest, jobs = launcher_module("_manifest"), launcher_module("_job")
    settings = manifest.Settings(image="registry.example/hlat:1", kind=manifest.Kind[kind])
    of = jobs.job(config, manifest.COMMAND, Path(settings.mount))
    files = {"config.yaml": "as composed\n", "words.json": "{}\n"}
    compiled = jobs.compiled(config, of.working_directory)
    memory = config.hardware.host_memory_gib
    documents = manifest.manifest(of, memory, files, settings, compiled)
    now = launcher_module("_yaml").as_yaml(*documents)
    file = GOLDEN / f"{record}.yaml"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{record} changed; if meant: pytest tests/golden --update"


@pytest.mark.parametrize("record", EVALUATIONS)
def test_manifest_of_an_evaluation_is_as_recorded(record, compose, pytestconfig):
    chosen = ("run.name=evaluations", "hardware=h100_p5", "parallelism.tp=8")
    config = OmegaConf.to_object(compose(*chosen))
    words = ("runs/hlat_70b", "tasks=hlat_table2", "follow=true")
    asked = Evaluation("hlat_table2-1a2b3c4d", words[0], Path(words[0]), words, config)
    documents = launcher_module("_kubernetes").evaluation_manifest(
        asked,
        launcher_module("_manifest").Settings(
            image="registry.example/hlat:1",
            kind=launcher_module("_manifest").Kind[EVALUATIONS[record]],
        ),
    )
    now = launcher_module("_yaml").as_yaml(*documents)
    file = GOLDEN / f"{record}.yaml"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{record} changed; if meant: pytest tests/golden --update"


def test_every_record_is_compared():
    records = {file.stem for file in GOLDEN.glob("*.yaml")}
    assert records == RECORDS.keys() | EVALUATIONS.keys()
