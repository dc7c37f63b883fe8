"""The entry that writes a cluster, and what its nodes run, as far as this machine can run it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.compose import import_launcher_module
from hlat.jobs import cluster

REPOSITORY = Path(__file__).resolve().parent.parent.parent.parent
SCRIPTS = REPOSITORY / "launchers/parallelcluster"
SITE = (
    *("--region", "us-west-2", "--subnet", "subnet-0aaa", "--head-subnet", "subnet-0bbb"),
    *("--key", "my-key", "--scripts", "s3://my-bucket/hlat"),
)
TRN1 = ("hardware=trn1_32xl", "hardware.nodes=64", "compiler=neuron_2_28")


def test_files_and_the_commands_that_use_them(tmp_path, capsys):
    output = tmp_path / "with space"
    assert cluster.main([*TRN1, *SITE, "--fsx-gib", "4800", "--output", str(output)]) == 0
    assert {file.name for file in output.iterdir()} == {
        *("cluster.yaml", "check_node.sh", "environment.sh", "node.sh")
    }
    assert all(os.access(file, os.X_OK) for file in output.glob("*.sh"))
    described = OmegaConf.load(output / "cluster.yaml")
    (nodes,) = described.Scheduling.SlurmQueues[0].ComputeResources
    assert (nodes.MinCount, nodes.MaxCount) == (64, 64)
    assert described.SharedStorage[0].FsxLustreSettings.StorageCapacity == 4800
    copy, create, price = capsys.readouterr().out.splitlines()
    assert copy.startswith("aws s3 cp ")
    assert f"'{output}' s3://my-bucket/hlat" in copy
    assert create.endswith(f"'{output}/cluster.yaml'")
    assert price.startswith("64 x trn1.32xlarge: 1,376.00 USD per hour at 21.5 USD (2024, HLAT")


def test_an_experiment_determines_the_cluster(tmp_path, capsys):
    assert cluster.main(["experiment=hlat_70b", *SITE, "--output", str(tmp_path)]) == 0
    assert "256 x trn1.32xlarge: 5,504.00 USD per hour" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (("hardware=cpu",), "hardware.name=cpu is not a known instance type; use hardware=trn1"),
        (("hardware=trn1_32xl",), r"compiler.neuron_sdk=null has no .* use 2.28 or 2.31, as in "),
        pytest.param(
            *(("hardware=trn1_32xl", "compiler=neuron_2_33"), "use 2.28 or 2.31, as in compiler="),
            marks=pytest.mark.slow,
        ),
        (("hardware=trn2_48xl", "compiler=neuron_2_20"), "use 2.28 or 2.31 or 2.33"),
        (("hardware=h100_p5", "compiler=neuron_2_33"), "has no NeuronCores; use compiler=none"),
        (("hardwear=h100_p5",), "did you mean hardware"),
    ],
)
def test_unsuitable_runs_are_rejected(run, problem, tmp_path, capsys):
    assert cluster.main([*run, *SITE, "--output", str(tmp_path / "new")]) == 2
    assert re.search(problem, capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_an_unknown_price_is_not_estimated(tmp_path, capsys):
    run = ("hardware=trn1n_32xl", "compiler=neuron_2_31")
    assert cluster.main([*run, *SITE, "--output", str(tmp_path)]) == 0
    assert "1 x trn1n.32xlarge: price unknown; set hardware.price" in capsys.readouterr().out


BLOCK = ("capacity_reservation=cr-0123456789abcdef0", "capacity_block=true")
SECRET = "arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm-A1b2C3"
DATABASE = ("database=db.example.com", "database_user=slurm", f"database_password_secret={SECRET}")
GROUP = "arn:aws:resource-groups:us-west-2:123456789012:group/training"
CONTRADICTIONS = {
    "a block without a reservation": (BLOCK[1:], "capacity_block=true needs a reservation; set"),
    "a block in a group": (
        (f"capacity_reservation={GROUP}", BLOCK[1]),
        "by id only; set capacity_reservation=cr-",
    ),
    "a block of too many nodes": (
        (*BLOCK, "hardware.nodes=65"),
        "hardware.nodes=65 exceeds the 64 instances of a capacity block; set hardware.nodes=64",
    ),
    "a reservation that is none": (
        ("capacity_reservation=mine",),
        "capacity_reservation=mine is neither an id nor a resource group; use cr-0123",
    ),
    "a group elsewhere": (
        (f"capacity_reservation={GROUP.replace('us-west-2', 'us-east-1')}",),
        "capacity_reservation is in region us-east-1, but region=us-west-2; use one of us-west-2",
    ),
    "half a database": (
        DATABASE[:1],
        "database= given without database_user= and database_password_secret=; set all of",
    ),
    "a database with a scheme": (
        ("database=mysql://db.example.com", *DATABASE[1:]),
        "database=mysql://db.example.com is not of the form HOST or HOST:PORT",
    ),
    "a secret elsewhere": (
        (*DATABASE[:2], f"database_password_secret={SECRET.replace('us-west-2', 'us-east-1')}"),
        "database_password_secret is in region us-east-1, but region=us-west-2",
    ),
    "a name that is none": (
        (*DATABASE, "database_name=hl-at"),
        "database_name=hl-at is not a name of a database; use at most 64 lower-case letters",
    ),
    "a security group that is none": (
        (*DATABASE, "database_security_group=open"),
        "database_security_group=open is not an id of a security group, such as sg-",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.slow_after(5)
def test_contradictory_settings_are_rejected(name, tmp_path, capsys):
    settings, problem = CONTRADICTIONS[name]
    assert cluster.main([*TRN1, *SITE, *settings, "--output", str(tmp_path / "new")]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_block_of_a_type_without_blocks_is_rejected(tmp_path, capsys):
    run = ("hardware=trn1n_32xl", "compiler=neuron_2_31")
    assert cluster.main([*run, *SITE, *BLOCK, "--output", str(tmp_path / "new")]) == 2
    assert "no capacity blocks of hardware.name=trn1n.32xlarge; use trn1" in capsys.readouterr().err


def test_a_password_is_rejected_and_not_repeated(tmp_path, capsys):
    settings = (*DATABASE[:2], "database_password_secret=hunter2")
    assert cluster.main([*TRN1, *SITE, *settings, "--output", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "store the password in AWS Secrets Manager and set arn:" in error
    assert "hunter2" not in error


@pytest.mark.parametrize("url", ["my-bucket/hlat", "s3://my-bucket", "s3://my-bucket/hlat/"])
def test_an_invalid_url_of_scripts_is_rejected(url, capsys):
    with pytest.raises(SystemExit) as end:
        cluster.main([*TRN1, *SITE[: SITE.index("--scripts")], "--scripts", url])
    assert end.value.code == 2
    assert f"{url} is not of the form s3://BUCKET/DIR" in capsys.readouterr().err


def test_the_packages_are_pinned_as_the_project_pins_them():
    pins = (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert set(
        import_launcher_module("parallelcluster._cluster_config").GPU_PYTHON_PACKAGES
    ) <= set(pins)


@pytest.mark.parametrize("sdk", ["2.28", "2.31"])
def test_the_packages_of_engine_nxd_are_pinned(sdk):
    requirements = OmegaConf.load(SCRIPTS / "neuron_releases.yaml")[sdk].python
    pins = dict(requirement.split("==") for requirement in requirements)
    assert {"torch", "torch-xla", "libneuronxla", "neuronx-cc"} <= pins.keys()
    assert pins["torch-neuronx"].startswith(pins["torch"])
    tested = (REPOSITORY / "constraints-nxd.txt").read_text().splitlines()
    for name in ("torch", "torch-xla", "boto3", "transformers"):
        assert f"{name}=={pins[name]}" in tested


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda script: script.name)
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


def test_a_complete_environment_is_not_changed(tmp_path):
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\nnumpy\n")
    command = [SCRIPTS / "environment.sh", tmp_path, "torch==2.13.0", "numpy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path} is there\n"), done.stderr


class Node:
    """Node with an installed check, and plain files as devices."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(SCRIPTS / "check_node.sh", folder)
        (folder / "scontrol").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{folder}/told\n')
        (folder / "scontrol").chmod(0o755)
        for i in range(3):
            (folder / f"neuron{i}").touch()
        (folder / "neuron_other").touch()

    def check(self, *expected: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        (self.folder / "expected").write_text("".join(f"{line}\n" for line in expected))
        path = f"{self.folder}:{os.environ['PATH']}"
        return subprocess.run(
            [self.folder / "check_node.sh"],
            env={"PATH": path, **variables},
            capture_output=True,
            text=True,
        )

    def get_scontrol_arguments(self) -> list[str]:
        return (self.folder / "told").read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_complete_node_passes(node):
    devices = f"3 {node.folder}/neuron[0-9]*"
    for variables in ({}, {"SLURM_JOB_ID": "7"}):
        done = node.check(devices, "mounted /proc", **variables)
        assert (done.returncode, done.stderr) == (0, "")
    assert not (node.folder / "told").exists()


def test_a_defective_node_fails_before_a_job(node):
    pattern = f"{node.folder}/neuron[0-9]*"
    required = (f"4 {pattern}", "1 /nowhere/*", f"mounted {node.folder}")
    done = node.check(*required, SLURM_JOB_ID="7")
    assert done.returncode == 1
    assert done.stderr == (
        f"hlat: 3 of 4 {pattern},0 of 1 /nowhere/*,{node.folder} is not mounted\n"
    )
    assert not (node.folder / "told").exists()


def test_a_defective_idle_node_is_drained(node):
    done = node.check("1 /nowhere/*")
    assert done.returncode == 0, done.stderr
    update, name, *rest = node.get_scontrol_arguments()
    assert (update, rest) == ("update", ["State=DRAIN", "Reason=hlat: 0 of 1 /nowhere/*"])
    assert re.fullmatch(r"NodeName=[\w-]+", name)
