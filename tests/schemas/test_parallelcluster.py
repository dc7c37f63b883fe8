"""ParallelCluster's own code takes the clusters of all presets, and tells what is wrong with others."""

import json
import subprocess
from pathlib import Path

import pytest

from hlat.config import compose

compose.register_configs()
from hydra_plugins.hlat_launchers._job_spec import NODE_TYPES  # noqa: E402 (known from now)

HERE = Path(__file__).parent
CLUSTERS = sorted((HERE.parent / "golden/clusters").glob("*.yaml"))
SCRIPTS = sorted((HERE.parent.parent / "launchers/parallelcluster").glob("*.sh"))
BROKEN = {
    "a setting that it does not have": ("Efa:", "Efaa:", "Unknown field"),
    "a file system of a size that FSx has not": (": 9600", ": 9601", "increments of 2,400"),
    "a setting of Slurm that is its own": ("HealthCheckInterval", "Prolog", "not allowed: Prolog"),
    "fewer nodes at most than at least": ("MinCount: 4", "MinCount: 5", "Max count"),
}


@pytest.fixture(scope="module")
def said(schemas: Path, tmp_path_factory: pytest.TempPathFactory):
    """What ParallelCluster says of every cluster and of every broken one, by name."""
    files = {file.stem: file for file in CLUSTERS}
    for name, (old, new, _) in BROKEN.items():
        files[name] = tmp_path_factory.mktemp("broken") / "cluster.yaml"
        text = CLUSTERS[0].read_text()
        assert old in text
        files[name].write_text(text.replace(old, new))
    done = subprocess.run(
        [schemas / "python", HERE / "clusters.py", *files.values()],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(files, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)
def test_it_starts_nodes_side_by_side_with_efa_on_every_card(file: Path, said) -> None:
    told = said[file.stem]
    assert told["noted"] == ["DeletionPolicyValidator"], told  # that the file system is kept
    assert told["placed"]
    (kind,) = [
        kind for name, kind in NODE_TYPES.items() if f"InstanceType: {name}\n" in file.read_text()
    ]
    efa = [interface for interface in told["interfaces"] if (interface or "").startswith("efa")]
    assert len(efa) == kind.num_efa_interfaces


@pytest.mark.parametrize("name", BROKEN)
def test_it_tells_what_is_wrong(name: str, said) -> None:
    assert BROKEN[name][2] in json.dumps(said[name])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path, schemas: Path) -> None:
    done = subprocess.run(
        [schemas / "shellcheck", "--severity=style", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
