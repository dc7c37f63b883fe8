"""The schemas of Kubernetes and Kubeflow accept the recorded manifests and reject invalid ones."""

import json
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden/manifests"
RECORDS = sorted(GOLDEN.glob("*.yaml"))
JOBSET, PYTORCH_JOB = "trn1_32xl_JobSet", "trn1_32xl_PyTorchJob"
BROKEN = {
    "a field that JobSet has not": (JOBSET, "maxRestarts", "maxRestart", "maxRestart is unknown"),
    "a field that a job has not": (JOBSET, "parallelism", "paralelism", "'paralelism' was"),
    "a field that a pod has not": (PYTORCH_JOB, "workingDir", "workDir", "workDir"),
    "a field that PyTorchJob has not": (
        PYTORCH_JOB,
        "backoffLimit",
        "backof",
        "backof is unknown",
    ),
    "a number in words": (JOBSET, "completions: 4", "completions: four", "four"),
    "a text that is none": (JOBSET, "value: '64'", "value: 64", "64"),
    "a lifetime that JobSet has not": ("settings_JobSet", "ttlSeconds", "ttlMinutes", "ttlMinutes"),
    "a lifetime that PyTorchJob has not": (
        "settings_PyTorchJob",
        "ttlSeconds",
        "ttlMinutes",
        "ttlMinutes",
    ),
    "a secret that a pod has not": ("settings_JobSet", "secretKeyRef", "secretRef", "secretRef"),
    "an affinity that a pod has not": (
        "settings_PyTorchJob",
        "nodeSelectorTerms",
        "nodeTerms",
        "node_selector_terms",
    ),
    "a label that is no text": ("settings_JobSet", "team: nlp", "team: 7", "7"),
}


@pytest.fixture(scope="module")
def problems(schemas: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return the problems of all recorded and invalid manifests by name."""
    files = {file.stem: file for file in RECORDS}
    for name, (record, old, new, _) in BROKEN.items():
        files[name] = tmp_path_factory.mktemp("broken") / "manifest.yaml"
        text = (GOLDEN / f"{record}.yaml").read_text()
        assert old in text
        files[name].write_text(text.replace(old, new))
    command = [schemas / "python", HERE / "manifests.py", *files.values()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(files, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("record", RECORDS, ids=lambda file: file.stem)
def test_schemas_accept_recorded_manifests(record: Path, problems) -> None:
    assert problems[record.stem] == []


@pytest.mark.parametrize("name", BROKEN)
def test_schemas_reject_invalid_manifests(name: str, problems) -> None:
    assert BROKEN[name][3] in " ".join(problems[name])
