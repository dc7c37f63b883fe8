"""Evaluations as jobs of Slurm and Kubernetes: validation, and the submitted job.

There is no scheduler: fake sbatch and squeue programs accept every job. Packages that a login node
lacks cannot be imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hlat.evaluate import __main__ as evaluate

REPOSITORY = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys
for name in ("torch", "lm_eval", "pyarrow", "tokenizers", "safetensors"):
    sys.modules[name] = None
from importlib import util
found = util.find_spec
util.find_spec = lambda name, *further: None if name == "lm_eval" else found(name, *further)
"""
SBATCH = f"""#!{sys.executable}
import pathlib, sys
here = pathlib.Path(__file__).parent
if pathlib.Path(__file__).name == "squeue":
    print((here / "queue").read_text(), end="") if (here / "queue").exists() else None
elif "--test-only" not in sys.argv:
    print(41)
"""
SLURM = ("hydra/launcher=slurm", "hydra.launcher.partition=trn")


class Login:
    """Login node without torch and without lm-evaluation-harness."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs = folder, programs
        for name in ("sbatch", "srun", "squeue"):
            (programs / name).write_text(SBATCH)
            (programs / name).chmod(0o755)
        (programs / "sitecustomize.py").write_text(WITHOUT)

    def evaluate(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self._python("hlat.evaluate", *arguments)

    def jobs(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self._python("hlat.jobs", *arguments)

    def _python(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        path = f"{REPOSITORY}{os.pathsep}{self.programs}"
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": path, "PATH": str(self.programs)},
            capture_output=True,
            text=True,
        )


@pytest.fixture
def login(tmp_path: Path, uninterrupted) -> Login:
    """Return a login node with the small run and its checkpoints of steps 10, 15 and 20."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "home/runs").mkdir(parents=True)
    (tmp_path / "home/runs/whole").symlink_to(uninterrupted.folder / "runs/whole")
    return Login(tmp_path / "home", tmp_path / "programs")


@pytest.fixture
def submission(login: Login) -> Path:
    """Yield the directory of a submitted evaluation, and remove it, since the run is shared."""
    done = login.evaluate("runs/whole", "tasks=hlat_cr", "limit=7", *SLURM, "parallelism.tp=2")
    assert done.returncode == 0, done.stderr
    (found,) = (login.folder / "runs/whole/evaluations").glob("hlat_cr-*/submissions/1")
    assert f"job 41 evaluates {found.parents[1].relative_to(login.folder)}" in done.stdout
    yield found
    subprocess.run(["rm", "-r", str(found.parents[1])], check=True)


@pytest.mark.slow  # 4 s: installs a copy of the code
def test_a_job_gets_files_and_settings_of_the_harness_unchanged(login):
    settings = ['doc_ids={"my_task": [0, 3]}', 'system_instruction=Don\'t "guess"', "seed=3"]
    arguments = ["runs/whole", "tasks=tasks/my_task.yaml", "include_path=tasks", *settings]
    (login.folder / "tasks").mkdir()
    done = login.evaluate(*arguments, *SLURM)
    assert done.returncode == 0, done.stderr
    [directory] = (login.folder / "runs/whole/evaluations").glob("my_task-*")
    submission = directory / "submissions/1"
    [command] = json.loads((submission / "job.json").read_text())["commands"]
    assert command[3:] == arguments
    subprocess.run(["rm", "-r", str(directory)], check=True)


@pytest.mark.slow  # 8 s: installs a copy of the code
def test_submit_one_job_with_a_copy_of_the_code(login, submission):
    sent = json.loads((submission / "job.json").read_text())
    (archive,) = submission.glob("code-*.zip")
    arguments = [str(archive), "hlat.evaluate", "runs/whole", "tasks=hlat_cr", "limit=7"]
    assert sent["commands"] == [[sys.executable, *arguments, "parallelism.tp=2"]]
    assert (sent["nodes"], sent["trains"]) == (1, False)
    assert sent["scores"] == str(login.folder / "runs/whole/evaluations")
    assert "conf/config.yaml" in zipfile.ZipFile(archive).namelist()

    (login.programs / "queue").write_text("41|RUNNING|n1|None\n")
    asked = ("runs/whole", "tasks=hlat_cr", "limit=7", *SLURM)
    again = login.evaluate(*asked, "parallelism.tp=1")
    assert again.returncode == 2
    assert "runs/whole: job 41 is RUNNING; cancel it with hlat jobs cancel" in again.stderr
    listed = login.jobs("runs/whole/evaluations").stdout.splitlines()
    assert listed[1].split() == ["whole:", submission.parents[1].name, "41", "RUNNING", "0", "n1"]
    other = login.evaluate(*asked[:2], "limit=8", *SLURM)
    assert other.returncode == 0, other.stderr
    first, second = login.jobs("runs").stdout.splitlines()[1:]
    assert {first.split()[0], second.split()[0]} == {"whole:"}
    for folder in (login.folder / "runs/whole/evaluations").glob("hlat_cr-*"):
        if folder != submission.parents[1]:
            subprocess.run(["rm", "-r", str(folder)], check=True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["runs/whole", *SLURM, "hydra.launcher.partitio=x"], "mean hydra.launcher.partition?"),
        (["runs/whole", *SLURM, "hydra.launcher.time=soon"], "hydra.launcher.time='soon' is no"),
        (["runs/whole", *SLURM, "hydra.launcher.prune=true"], "a command is one job"),
        (["runs/whole", "hydra/launcher=slrm"], "did you mean slurm?"),
        (["runs/whole", "hydra.launcher.jobs=2"], "hydra/launcher=local does not use"),
        (["runs/whole", *SLURM, "hydra.run.dir=x"], "hydra.run.dir= is not a setting"),
        (["runs/whole", *SLURM, "parallelism.tp=3"], "parallelism.tp=3"),
        (["runs/whole", *SLURM, "hardware=h20"], "h200"),
        (["runs/whole", *SLURM, "--step", "7"], "has no such checkpoint, only 10, 15, 20"),
        (["runs/whole", *SLURM, "--step", "10", "follow=true"], "remove step= and output="),
        (["runs/hole", *SLURM], "runs/hole does not exist"),
        (["runs", *SLURM], "runs is no run, checkpoint or Hugging Face"),
        (["runs", *SLURM, "follow=true"], "runs contains no config.yaml"),
    ],
)
@pytest.mark.slow_after(4)
def test_refuse_mistakes_before_submission(login, arguments, problem, monkeypatch, capsys):
    found = importlib.util.find_spec
    without_harness = lambda name, *args: None if name == "lm_eval" else found(name, *args)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without_harness)
    refused(login, [arguments[0], "tasks=boolq", *arguments[1:]], problem, monkeypatch, capsys)


@pytest.mark.slow  # test_evaluate.py asserts the same message without a launcher
def test_refuse_a_task_that_does_not_exist(login, harness_tasks_listed_once, monkeypatch, capsys):
    arguments = ["runs/whole", "tasks=hlat_tabel2", *SLURM]
    refused(login, arguments, "did you mean hlat_table2?", monkeypatch, capsys)


def refused(login, arguments, problem, monkeypatch, capsys):
    """Run the command in this process (faster), and assert that it submits no job."""
    monkeypatch.chdir(login.folder)
    monkeypatch.setenv("PATH", str(login.programs))
    monkeypatch.setattr(sys, "argv", ["hlat.evaluate", *arguments])
    try:
        code = evaluate.main()
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert problem in capsys.readouterr().err
    assert not [*login.folder.glob("runs/*/evaluations/*/submissions")]


@pytest.mark.slow
def test_write_a_manifest_with_the_resources_of_the_layout(login):
    import yaml

    image = ("hydra/launcher=kubernetes", "hydra.launcher.image=registry.example/hlat:1")
    asked = ("tasks=hlat_cr", "follow=true", "hardware=h100_p5", "parallelism.tp=8")
    done = login.evaluate("runs/elsewhere", *asked, *image)
    assert done.returncode == 0, done.stderr
    (file,) = login.folder.rglob("manifest.yaml")
    assert (
        f"{file.relative_to(login.folder)} evaluates runs/elsewhere; create it with:" in done.stdout
    )
    (work,) = yaml.safe_load_all(file.read_text())
    (node,) = work["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    command = ["python", "-m", "hlat.evaluate", "runs/elsewhere", *asked]
    assert container["command"][-len(command) :] == command
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "configMap" not in file.read_text()
