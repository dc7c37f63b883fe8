"""Contradictory settings of the Slurm launcher are rejected, and scripts are safe."""

import shlex
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config import compose as composition
from hlat.config.config_errors import ConfigError
from hlat.jobs.submission import SubmissionDir

composition.register_configs()
from hydra_plugins.hlat_launchers._job_spec import JobSpec, build_job  # noqa: E402 (known from now)
from hydra_plugins.hlat_launchers.slurm._sbatch_script import (  # noqa: E402 (registered above)
    SlurmLauncherConfig,
    build_array_command,
    build_array_parameters,
    build_command,
    build_sbatch_parameters,
    build_sbatch_script,
    build_submission,
    parse_time_limit,
    validate_slurm_settings,
)

JOB = JobSpec(
    name="x",
    run_dir=Path("/runs/x"),
    working_directory=Path("/home"),
    instance_type="trn1.32xlarge",
    node_type=None,
    num_nodes=2,
    command=("python", "hlat.train"),
    environment={"A": "b"},
)
PLACE = SubmissionDir(Path("/runs/x/submissions/1"))


def text(folder: str = "/runs/x/submissions/1", **settings) -> str:
    submission = SubmissionDir(Path(folder))
    parameters = build_sbatch_parameters(
        JOB, SlurmLauncherConfig(**settings), submission.build_log_path("%j"), Path("/home")
    )
    program = ["/usr/bin/python", f"{folder}/code.zip"]
    return build_sbatch_script(parameters, submission.path, build_command(program, submission.path))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        *(("60", 3600), ("60:05", 3605), ("1:00:09", 3609), ("2-12", 216000)),
        *(("2-12:01", 216060), ("2-12:01:01", 216061), ("0", 0)),
    ],
)
def test_valid_time_limits(limit, seconds):
    validate_slurm_settings(SlurmLauncherConfig(time=limit))
    assert parse_time_limit(limit) == seconds


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"time": "2 hours"}, "hydra.launcher.time='2 hours' is not a time limit"),
        ({"time": "5"}, "time=5 is 300 s, and the run stops hydra.launcher.signal_s=300 s before"),
        ({"time": "0:59", "signal_s": 60}, "increase time or reduce signal_s"),
        ({"signal_s": 0}, "hydra.launcher.signal_s=0 is too small"),
        ({"jobs": 0}, "hydra.launcher.jobs=0 is too small"),
        ({"max_attempts": 0}, "hydra.launcher.max_attempts=0 is too small"),
        ({"options": {"--qos": "x"}}, "options.--qos is not the long name"),
        ({"options": {"a\nb": "x"}}, "is not the long name"),
        ({"options": {"nodes": 3}}, "options.nodes: set hardware.nodes"),
        ({"options": {"array": "1-3"}}, "options.array: points with equal resources are an array"),
        ({"options": {"qos": None}}, "options.qos=None is neither text nor a number"),
        ({"srun_options": {"mpi": ["x"]}}, "srun_options.mpi=['x'] is neither text nor a number"),
    ],
)
def test_contradictory_settings_are_rejected(settings, sentence):
    with pytest.raises(ConfigError) as refused:
        validate_slurm_settings(SlurmLauncherConfig(**settings))
    assert sentence in str(refused.value)


def test_any_option_is_passed_once_and_unchanged():
    shown = text(options={"qos": "high", "mail-user": "me@here", "hold": True, "mem": "5G"})
    lines = shown.splitlines()
    for line in ("--qos=high", "--mail-user=me@here", "--hold", "--mem=5G"):
        assert lines.count(f"#SBATCH {line}") == 1
    assert shown.count("--mem") == 1
    assert "--hold" not in text(options={"hold": False})
    assert "--exclusive" not in text(exclusive=False)
    assert "--mem" not in text(exclusive=False)


@pytest.mark.parametrize("key", ["partition", "account", "constraint"])
@pytest.mark.parametrize("sign", ["\n", "\r", "\0", "\x1b"])
def test_line_breaks_are_rejected(key, sign):
    with pytest.raises(ConfigError, match=f"{key}="):
        text(**{key: f"a{sign}touch x"})
    with pytest.raises(ConfigError, match="comment="):
        text(options={"comment": f"a{sign}touch x"})


def test_a_shell_executes_no_setting(tmp_path):
    wild = "it's $(touch x) `touch x` \"; touch x & # %j"
    shown = text(folder=f"/runs/{wild}/1", account=wild, options={"comment": wild})
    script = shown.replace("exec ", "printf '%s\\n' ")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    code = f"/runs/{wild}/1/code.zip"
    arguments = ["/usr/bin/python", code, "hlat.jobs.attempt", f"/runs/{wild}/1"]
    assert done.stdout.splitlines() == arguments
    assert not [*tmp_path.iterdir()]
    assert f"#SBATCH --account={shlex.quote(wild)}" in shown
    assert "/runs/it" in shown
    assert "# %%j/1/%j.log" in shown


def test_image_and_srun_options_are_arguments():
    settings = SlurmLauncherConfig(
        container_image="a b.sqsh", srun_options={"container-mounts": "/fsx:/fsx", "pty": True}
    )
    sent = build_submission(JOB, settings, [["python", "hlat.train"]], trains=True)
    arguments = ["--container-image=a b.sqsh", "--container-mounts=/fsx:/fsx", "--pty"]
    assert sent.options == arguments
    assert (sent.nodes, sent.environment, sent.open_files) == (2, {"A": "b"}, 131071)


def test_tasks_of_an_array_write_to_their_directories(tmp_path):
    wild = tmp_path / "it's 5%"
    settings = SlurmLauncherConfig(jobs=2)
    log = PLACE.build_log_path("%j")
    parameters = build_sbatch_parameters(JOB, settings, log, Path("/home"))
    parameters = build_array_parameters(parameters, wild, "beta2")
    parameters["additional_parameters"]["array"] = settings.format_array([0, 1, 2, 5, 7, 8])
    shown = build_sbatch_script(parameters, wild, build_array_command(["python", "x.zip"], wild))
    lines = shown.splitlines()
    assert "#SBATCH --array=0-2,5,7-8%2" in lines
    assert "#SBATCH --job-name=beta2" in lines
    (output,) = [line for line in lines if line.startswith("#SBATCH --output=")]
    escaped = str(wild).replace("%", "%%")
    assert shlex.split(output)[1] == f"--output={escaped}/%a/%A_%a.log"
    script = shown.replace("exec ", "printf '%s\\n' ")
    done = subprocess.run(
        ["bash", "-c", script], env={"SLURM_ARRAY_TASK_ID": "7"}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["python", "x.zip", "hlat.jobs.attempt", f"{wild}/7"]
    assert SlurmLauncherConfig().format_array([3]) == "3"


@pytest.mark.parametrize(
    ("overrides", "num_gpus"),
    [
        (["hardware=h100_p5"], 8),
        (["hardware=rtx_4090"], 1),
        (["hardware=mi300x", "hardware.processes_per_node=4"], 4),
        (["hardware=h100", "engine.device=cpu"], None),
        (["hardware=trn1_32xl"], None),
        ([], None),
    ],
)
def test_a_job_requests_the_gpus_of_its_hardware(compose, tmp_path, overrides, num_gpus):
    config = OmegaConf.to_object(compose("run.name=x", *overrides))
    job = build_job(config, (), tmp_path)
    parameters = build_sbatch_parameters(job, SlurmLauncherConfig(), tmp_path / "x", tmp_path)
    assert parameters["additional_parameters"].get("gpus_per_node") == num_gpus
    settings = SlurmLauncherConfig(options={"gres": "gpu:a100:2"})
    parameters = build_sbatch_parameters(job, settings, tmp_path / "x", tmp_path)
    assert "gpus_per_node" not in parameters["additional_parameters"]
