"""Settings of the Slurm launcher that cannot mean what they say are refused, and scripts are safe."""

import shlex
import subprocess
from pathlib import Path

import pytest

from hlat.config import compose as composition
from hlat.config.config_errors import ConfigError
from hlat.jobs.submission import SubmissionDir

composition.register_configs()
from hydra_plugins.hlat_launchers._job_spec import JobSpec  # noqa: E402 (known from now)
from hydra_plugins.hlat_launchers.slurm._sbatch_script import (  # noqa: E402 (registered above)
    SlurmLauncherConfig,
    build_sbatch_parameters,
    build_sbatch_script,
    build_submission,
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
    place = SubmissionDir(Path(folder))
    told = build_sbatch_parameters(
        JOB, SlurmLauncherConfig(**settings), place.build_log_path("%j"), Path("/home")
    )
    return build_sbatch_script(told, place, ["/usr/bin/python", str(place.code_dir)])


@pytest.mark.parametrize("limit", ["60", "60:00", "1:00:00", "2-12", "2-12:00", "2-12:00:00"])
def test_limits_that_sbatch_takes(limit):
    validate_slurm_settings(SlurmLauncherConfig(time=limit))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"time": "2 hours"}, "hydra.launcher.time='2 hours' is not a time limit"),
        ({"signal_s": 0}, "hydra.launcher.signal_s=0 is too small"),
        ({"max_attempts": 0}, "hydra.launcher.max_attempts=0 is too small"),
        ({"options": {"--qos": "x"}}, "options.--qos is not the long name"),
        ({"options": {"a\nb": "x"}}, "is not the long name"),
        ({"options": {"nodes": 3}}, "options.nodes: set hardware.nodes"),
        ({"options": {"array": "1-3"}}, "options.array: each point is a separate job"),
        ({"options": {"qos": None}}, "options.qos=None is neither text nor a number"),
        ({"srun_options": {"mpi": ["x"]}}, "srun_options.mpi=['x'] is neither text nor a number"),
    ],
)
def test_settings_that_cannot_be_meant(settings, sentence):
    with pytest.raises(ConfigError) as refused:
        validate_slurm_settings(SlurmLauncherConfig(**settings))
    assert sentence in str(refused.value)


def test_any_option_goes_through_once_and_as_it_is():
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
def test_what_would_end_its_line_is_refused(key, sign):
    with pytest.raises(ConfigError, match=f"{key}="):
        text(**{key: f"a{sign}touch x"})
    with pytest.raises(ConfigError, match="comment="):
        text(options={"comment": f"a{sign}touch x"})


def test_a_shell_runs_nothing_of_what_a_user_has_written(tmp_path):
    wild = "it's $(touch x) `touch x` \"; touch x & # %j"
    shown = text(folder=f"/runs/{wild}/1", account=wild, options={"comment": wild})
    said = shown.replace("exec ", "printf '%s\\n' ")
    done = subprocess.run(["bash", "-c", said], cwd=tmp_path, capture_output=True, text=True)
    code = f"/runs/{wild}/1/code"
    words = ["/usr/bin/python", code, "hlat.jobs.attempt", f"/runs/{wild}/1"]
    assert done.stdout.splitlines() == words
    assert not [*tmp_path.iterdir()]
    assert f"#SBATCH --account={shlex.quote(wild)}" in shown
    assert "/runs/it" in shown
    assert "# %%j/1/%j.log" in shown


def test_an_image_and_options_of_srun_become_words():
    settings = SlurmLauncherConfig(
        container_image="a b.sqsh", srun_options={"container-mounts": "/fsx:/fsx", "pty": True}
    )
    sent = build_submission(JOB, settings, [["python", "hlat.train"]], trains=True)
    words = ["--container-image=a b.sqsh", "--container-mounts=/fsx:/fsx", "--pty"]
    assert sent.options == words
    assert (sent.nodes, sent.environment, sent.open_files) == (2, {"A": "b"}, 131071)
