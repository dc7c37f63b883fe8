"""The commands of a SkyPilot task, the command that starts it, and rejected settings."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hlat.config.compose import import_launcher_module
from hlat.config.config_errors import ConfigError

MOUNT = {"/mnt/hlat": "hlat"}


@pytest.fixture
def launcher():
    return import_launcher_module("skypilot._skypilot_launcher")


@pytest.fixture
def job(launcher):
    jobs = import_launcher_module("_job_spec")
    command = ("python", "-m", "hlat.train", "--frozen", launcher._CONFIG_DIR, "it's")
    return jobs.JobSpec(
        name="x",
        run_dir=Path("/mnt/hlat/runs/x"),
        working_directory=Path("/mnt/hlat"),
        instance_type="p5.48xlarge",
        node_type=jobs.NODE_TYPES["p5.48xlarge"],
        num_nodes=2,
        command=command,
        environment={"A": "1"},
    )


def test_every_node_runs_a_supervisor_with_its_rank(launcher, job, tmp_path):
    (tmp_path / "python").write_text(
        '#!/bin/sh\necho "$HLAT_NODES $HLAT_NODE $HLAT_RDZV_ENDPOINT $PWD"\nprintf "%s|" "$@"\n'
        "exit 75\n"
    )
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "a b").mkdir()
    settings = launcher.SkyPilotLauncherConfig(mount=str(tmp_path))
    done = subprocess.run(
        ["bash", "-c", launcher.build_task(job, tmp_path, settings)["run"]],
        cwd=tmp_path / "a b",
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        },
        capture_output=True,
        text=True,
    )
    ranks, arguments = done.stdout.splitlines()
    assert ranks == f"2 1 10.0.0.1:41000 {tmp_path}"
    assert arguments == f"-m|hlat.train|--frozen|{tmp_path}/a b|it's|"
    assert done.returncode == 75, done.stderr


def test_null_removes_a_field_of_the_resources(launcher, job, tmp_path):
    resources = {"instance_type": None, "accelerators": "H100:8"}
    settings = launcher.SkyPilotLauncherConfig(resources=resources)
    found = launcher.build_task(job, tmp_path, settings)["resources"]
    assert "instance_type" not in found
    assert found["accelerators"] == "H100:8"


def test_secrets_have_names_and_no_values(launcher, job, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    settings = launcher.SkyPilotLauncherConfig(secrets=["WANDB_API_KEY"])
    assert launcher.build_task(job, tmp_path, settings)["secrets"] == {"WANDB_API_KEY": None}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "hydra.launcher.mount=/mnt/hlat is not a path of hydra.launcher.file_mounts or vol"),
        (
            {"volumes": MOUNT, "recover_on_exit_codes": [0, 2, 3, 75]},
            "recover_on_exit_codes contains 2; remove it",
        ),
    ],
)
def test_settings_that_lose_files_are_rejected(launcher, job, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        launcher.SkyPilotLauncher(**settings)._validate([job])


def test_several_nodes_without_efa_are_rejected(launcher, job):
    node_type = import_launcher_module("_job_spec").NODE_TYPES["trn2.48xlarge"]
    trn2 = replace(job, instance_type="trn2.48xlarge", node_type=node_type)
    sky = launcher.SkyPilotLauncher(volumes=MOUNT)
    sky._validate([job, replace(trn2, num_nodes=1)])
    with pytest.raises(ConfigError, match=r"hardware\.nodes=2 of trn2\.48xlarge need EFA"):
        sky._validate([trn2])


def test_sky_is_run_if_installed(launcher, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "sky").write_text('#!/bin/sh\necho "sky $*"\nexit "$CODE"\n')
    (tmp_path / "sky").chmod(0o755)
    assert shutil.which("sky") == str(tmp_path / "sky")
    sky = launcher.SkyPilotLauncher(volumes=MOUNT, secrets=["A"])
    file = tmp_path / "hlat-x/task.yaml"
    monkeypatch.setenv("CODE", "0")
    sky._start(file, "it trains")
    command = f"sky jobs launch --yes --detach-run --secret A {file}"
    out = capfd.readouterr().out
    assert command in out
    assert "sky jobs logs --name hlat-x" in out
    monkeypatch.setenv("CODE", "1")
    with pytest.raises(ConfigError, match=f"sky does not start .* run: {command}"):
        sky._start(file, "it trains")
