"""ParallelCluster accepts the clusters of all presets and rejects invalid ones."""

import json
import subprocess
from pathlib import Path

import pytest

from hlat.config import compose

compose.register_configs()
from hydra_plugins.hlat_launchers._job_spec import NODE_TYPES  # noqa: E402 (known from now)

pytestmark = pytest.mark.xdist_group("parallelcluster")  # one worker starts its code
HERE = Path(__file__).parent
PRESETS = (
    *("trn1_32xl", "trn1n_32xl", "trn2_48xl", "trn2u_48xl"),
    *("a100_p4d", "h100_p5", "h200_p5e", "h200_p5en"),
)
CLUSTERS = sorted((HERE.parent / "golden/clusters").glob("*.yaml"))
SCRIPTS = sorted((HERE.parent.parent / "launchers/parallelcluster").glob("*.sh"))
BROKEN = {
    "a setting that it does not have": ("Efa:", "Efaa:", "Unknown field"),
    "a file system of a size that FSx has not": (": 9600", ": 9601", "increments of 2,400"),
    "a setting of Slurm that is its own": ("HealthCheckInterval", "Prolog", "not allowed: Prolog"),
    "fewer nodes at most than at least": ("MinCount: 4", "MinCount: 5", "Max count"),
}
BLOCK = "h200_p5e_capacity_block"
BROKEN_BLOCKS = {
    "a reservation that is no block": ("cr-0123456789abcdef0", "cr-9", "is not a Capacity Block"),
    "a password instead of a secret": (
        "PasswordSecretArn: arn:",
        "PasswordSecretArn: hunter2:",
        "does not match expected pattern",
    ),
    "a database with a scheme": ("Uri: db", "Uri: mysql://db", "do not provide a scheme"),
    "a placement group in a block": (
        "Enabled: false",
        "Enabled: true",
        "PlacementGroupCapacityTypeValidator",
    ),
}


@pytest.fixture(scope="module")
def results(schemas: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return the results of ParallelCluster for all recorded and invalid clusters by name."""
    files = {file.stem: file for file in CLUSTERS}
    for name, (old, new, _) in (BROKEN | BROKEN_BLOCKS).items():
        files[name] = tmp_path_factory.mktemp("broken") / "cluster.yaml"
        record = files[BLOCK] if name in BROKEN_BLOCKS else CLUSTERS[0]
        text = record.read_text()
        assert old in text
        files[name].write_text(text.replace(old, new))
    done = subprocess.run(
        [schemas / "python", HERE / "clusters.py", *files.values(), *NODE_TYPES],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip((*files, *NODE_TYPES), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)
def test_nodes_have_a_placement_group_and_efa_on_every_card(file: Path, results) -> None:
    result, text = results[file.stem], file.read_text()
    is_reserved = "CapacityReservationTarget" in text
    noted = ["DeletionPolicyValidator"]  # the file system is retained
    if is_reserved and "CAPACITY_BLOCK" not in text:
        noted.append("EfaPlacementGroupValidator")  # the reservation needs one
    assert result["noted"] == noted, result
    assert result["placed"] is not is_reserved  # a reservation determines the placement
    (node_type,) = [
        node_type
        for name, node_type in NODE_TYPES.items()
        if f"InstanceType: {name}\n" in file.read_text()
    ]
    efa = [interface for interface in result["interfaces"] if (interface or "").startswith("efa")]
    assert len(efa) == node_type.num_efa_interfaces


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)
def test_nodes_start_in_the_reservation(file: Path, results) -> None:
    text = file.read_text()
    target = (results[file.stem]["reservation"] or {}).get("CapacityReservationTarget")
    market = {"MarketType": "capacity-block"} if "CAPACITY_BLOCK" in text else None
    assert results[file.stem]["market"] == market
    if "CapacityReservationId" in text:
        assert target == {"CapacityReservationId": "cr-0123456789abcdef0"}
    elif "CapacityReservationResourceGroupArn" in text:
        arn = "arn:aws:resource-groups:us-east-2:123456789012:group/training"
        assert target == {"CapacityReservationResourceGroupArn": arn}
    else:
        assert target is None


@pytest.mark.parametrize("name", BROKEN | BROKEN_BLOCKS)
def test_reject_invalid_clusters(name: str, results) -> None:
    assert (BROKEN | BROKEN_BLOCKS)[name][2] in json.dumps(results[name])


@pytest.mark.parametrize("preset", PRESETS)
def test_ec2_has_the_same_figures(preset: str, results, compose) -> None:
    hardware = compose(f"hardware={preset}").hardware
    node_type, found = NODE_TYPES[hardware.name], results[hardware.name]
    assert found["chips"] in (node_type.num_chips, None)  # None: moto has no chips of trn2u
    assert found["efa"] == node_type.num_efa_interfaces
    assert found["blocks"] == node_type.has_capacity_blocks
    assert found["placed"]
    assert (found["memory_gib"], found["vcpus"]) == (hardware.host_memory_gib, hardware.vcpus)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path, schemas: Path) -> None:
    done = subprocess.run(
        [schemas / "shellcheck", "--severity=style", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
