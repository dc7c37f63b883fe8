"""The clusters of the presets, as ParallelCluster is told of them."""

from pathlib import Path

import pytest

from hlat import cluster

GOLDEN = Path(__file__).parent / "clusters"
PRESETS = {
    "trn1_32xl": "neuron_2_28",
    "trn1n_32xl": "neuron_2_31",
    "trn2_48xl": "neuron_2_33",
    "a100_p4d": "none",
    "h100_p5": "inductor",
}
SITE = (
    *("--region", "us-east-2", "--subnet", "subnet-0aaa", "--head-subnet", "subnet-0bbb"),
    *("--key", "my-key", "--scripts", "s3://my-bucket/hlat"),
)


@pytest.mark.parametrize("hardware", PRESETS)
def test_cluster_is_as_recorded(hardware, tmp_path, capsys, pytestconfig):
    run = (f"hardware={hardware}", "hardware.nodes=4", f"compiler={PRESETS[hardware]}")
    assert cluster.main([*run, *SITE, "--output", str(tmp_path)]) == 0
    now = (tmp_path / "cluster.yaml").read_text()
    file = GOLDEN / f"{hardware}.yaml"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{hardware} changed; if meant: pytest tests/golden --update"


def test_every_record_belongs_to_a_preset():
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == PRESETS.keys()
