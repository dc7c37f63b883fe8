"""ParallelCluster configurations of the presets."""

from pathlib import Path

import pytest

from hlat.jobs import cluster

GOLDEN = Path(__file__).parent / "clusters"
PRESETS = {
    "trn1_32xl": "neuron_2_28",
    "trn1n_32xl": "neuron_2_31",
    "trn2_48xl": "neuron_2_33",
    "trn2u_48xl": "neuron_2_31",
    "a100_p4d": "none",
    "h100_p5": "inductor",
    "h200_p5e": "none",
    "h200_p5en": "inductor",
}
SITE = (
    *("--region", "us-east-2", "--subnet", "subnet-0aaa", "--head-subnet", "subnet-0bbb"),
    *("--key", "my-key", "--scripts", "s3://my-bucket/hlat"),
)
BLOCK = ("capacity_reservation=cr-0123456789abcdef0", "capacity_block=true")
GROUP = "arn:aws:resource-groups:us-east-2:123456789012:group/training"
DATABASE = (
    *("database=db.example.com:3306", "database_user=slurm", "database_name=hlat"),
    "database_password_secret=arn:aws:secretsmanager:us-east-2:123456789012:secret:slurm-A1b2C3",
    "database_security_group=sg-0ccc",
)
RESERVATIONS = {
    "trn2_48xl_capacity_block": ("trn2_48xl", BLOCK),
    "h200_p5e_capacity_block": ("h200_p5e", (*BLOCK, *DATABASE)),
    "h100_p5_resource_group": ("h100_p5", (f"capacity_reservation={GROUP}", *DATABASE)),
}
RECORDS = {preset: (preset, ()) for preset in PRESETS} | RESERVATIONS


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.slow_after(4)
def test_cluster_is_as_recorded(record, tmp_path, capsys, pytestconfig):
    hardware, settings = RECORDS[record]
    run = (f"hardware={hardware}", "hardware.nodes=4", f"compiler={PRESETS[hardware]}")
    assert cluster.main([*run, *SITE, *settings, "--output", str(tmp_path)]) == 0
    now = (tmp_path / "cluster.yaml").read_text()
    file = GOLDEN / f"{record}.yaml"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{record} changed; if meant: pytest tests/golden --update"


def test_every_record_belongs_to_a_preset():
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == RECORDS.keys()
