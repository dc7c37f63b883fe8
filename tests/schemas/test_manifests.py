"""Kubernetes' and Kubeflow's own schemas take the recorded manifests, and tell what is wrong with others."""

import json
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden/manifests"
RECORDS = sorted(GOLDEN.glob("*.yaml"))
BROKEN = {
    "a field that JobSet has not": ("JobSet", "maxRestarts", "maxRestart", "maxRestart is unknown"),
    "a field that a job has not": ("JobSet", "parallelism", "paralelism", "'paralelism' was"),
    "a field that a pod has not": ("PyTorchJob", "workingDir", "workDir", "workDir"),
    "a field that PyTorchJob has not": (
        "PyTorchJob",
        "backoffLimit",
        "backof",
        "backof is unknown",
    ),
    "a number in words": ("JobSet", "completions: 4", "completions: four", "four"),
    "a text that is none": ("JobSet", "value: '64'", "value: 64", "64"),
}


@pytest.fixture(scope="module")
def told(schemas: Path, tmp_path_factory: pytest.TempPathFactory):
    """What is wrong with every record and every broken one, by name."""
    files = {file.stem: file for file in RECORDS}
    for name, (kind, old, new, _) in BROKEN.items():
        files[name] = tmp_path_factory.mktemp("broken") / "manifest.yaml"
        text = (GOLDEN / f"trn1_32xl_{kind}.yaml").read_text()
        assert old in text
        files[name].write_text(text.replace(old, new))
    words = [schemas / "python", HERE / "manifests.py", *files.values()]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(files, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("record", RECORDS, ids=lambda file: file.stem)
def test_its_schemas_know_all_of_it(record: Path, told) -> None:
    assert told[record.stem] == []


@pytest.mark.parametrize("name", BROKEN)
def test_its_schemas_tell_what_is_wrong(name: str, told) -> None:
    assert BROKEN[name][3] in " ".join(told[name])
