"""SkyPilot tasks of runs on several node types, and of an evaluation."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.command_job import CommandJob
from hlat.config.compose import import_launcher_module

GOLDEN = Path(__file__).parent / "tasks"
BUCKET = {"/mnt/hlat": {"source": "s3://my-bucket", "mode": "MOUNT_CACHED"}}
RECORDS = {
    "h100_p5": (4, {"file_mounts": BUCKET, "infra": "aws/us-east-2"}),
    "h200_p5en": (
        2,
        {
            "file_mounts": BUCKET,
            "secrets": ["WANDB_API_KEY"],
            "setup": "python -m pip install hlat",
            "resources": {"use_spot": True},
            "recover_on_exit_codes": [4, 75],
        },
    ),
    "trn2_48xl": (1, {"file_mounts": BUCKET}),
    "h200": (
        2,
        {
            "volumes": {"/mnt/hlat": "hlat"},
            "infra": "k8s",
            "resources": {"cpus": "16+", "network_tier": "best"},
        },
    ),
}


def build(job, settings) -> str:
    launcher = import_launcher_module("skypilot._skypilot_launcher")
    settings = launcher.SkyPilotLauncherConfig(**settings)
    task = launcher.build_task(job, Path("/sweep/hlat"), settings)
    return import_launcher_module("_yaml_writer").format_yaml(task)


def compare(name: str, now: str, pytestconfig) -> None:
    file = GOLDEN / f"{name}.yaml"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{name} changed; if meant: pytest tests/golden --update"


@pytest.mark.parametrize("hardware", RECORDS)
def test_task_is_as_recorded(hardware, compose, pytestconfig):
    nodes, settings = RECORDS[hardware]
    overrides = ("run.name=hlat_70b", f"hardware={hardware}", f"hardware.nodes={nodes}")
    sdk = "neuron_2_31" if hardware == "trn2_48xl" else "none"
    config = OmegaConf.to_object(compose(*overrides, f"compiler={sdk}"))
    command = ("python", "-m", "hlat.train", "--frozen", '"$CONFIG"')
    job = import_launcher_module("_job_spec").build_job(config, command, Path("/mnt/hlat"))
    compare(hardware, build(job, settings), pytestconfig)


def test_task_of_an_evaluation_is_as_recorded(compose, pytestconfig):
    config = OmegaConf.to_object(compose("run.name=evaluations", "hardware=h100_p5"))
    arguments = ("runs/it's", "tasks=hlat_table2")
    name, job_dir = "hlat_table2-1a2b3c4d", Path(arguments[0], "jobs")
    command_job = CommandJob("evaluate", name, arguments[0], job_dir, arguments, config)
    command = ("python", "-m", "hlat.evaluate", *arguments)
    jobs = import_launcher_module("_job_spec")
    job = jobs.build_command_job(command_job, command, Path("/mnt/hlat"))
    compare("evaluation", build(job, {"file_mounts": BUCKET}), pytestconfig)


def test_every_record_is_compared():
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == {*RECORDS, "evaluation"}
