"""Sweeps: all points are validated, then each is a process with a separate run directory."""

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from hlat.report import __main__ as report

SBATCH = f"""#!{sys.executable}
import pathlib, re, sys
if "--test-only" in sys.argv: sys.exit()
array = re.search("--array=([0-9]+)-?([0-9]*)", " ".join(sys.argv))
queue = pathlib.Path("queue").read_text().splitlines()
job = len(queue)
low, high = (int(array[1]), int(array[2] or array[1])) if array else (0, 0)
tasks = [f"{{job}}_{{task}}" for task in range(low, high + 1)] if array else [job]
queue += [f"{{task}}|PENDING||Resources" for task in tasks]
if len(queue) > int(pathlib.Path("limit").read_text()): sys.exit("sbatch: error: job limit")
pathlib.Path("queue").write_text("\\n".join([*queue, ""]))
print(job)
"""
"""Program that assigns the job numbers 0, 1 ... to jobs and tasks until a limit."""


def _folders(runner):
    root = runner.folder / "runs"
    return [path for path in root.glob("[!.]*") if path.name != "sweeps"]


@pytest.mark.slow  # tests/contract/test_launchers.py trains points with this launcher
def test_train_the_valid_points_in_parallel_in_one_group(
    runner, runner_at_step_10, without_figures, monkeypatch, capfd
):
    """Use choices of the user's configuration directory; two points are omitted.

    One point is the run of runner_at_step_10, under the name `x`.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    alone = runner.folder / "runs/x"
    alone.rename(runner.folder / "alone")
    mine = runner.folder / "mine/optimizer"
    mine.mkdir(parents=True)
    (mine / "fast.yaml").write_text("lr: 1e-2\n")
    arguments = (
        "optimizer=fast,adamw_tiny",
        "batch.micro_batch_size=4,3",
        "hydra.launcher.prune=true",
    )
    fixed = ("run.steps=5", "tracking=wandb", "tracking.report=true", "hydra.launcher.jobs=2")
    done = runner.run("-m", f"--config-dir={mine.parent}", *arguments, *fixed)
    assert done.returncode == 0, done.stderr
    (sweep,) = (runner.folder / "runs/sweeps").iterdir()
    folders = _folders(runner)
    rows = [*map(json.loads, (sweep / "sweep.jsonl").read_text().splitlines())]
    left_out = [row for row in rows if "problems" in row]
    assert len(left_out) == 2
    assert all("batch.micro_batch_size=3" in row["overrides"] for row in left_out)
    assert "is not a multiple of batch.micro_batch_size=3" in left_out[0]["problems"][0]
    trained = {Path(row["run_folder"]): row for row in rows if "problems" not in row}
    assert {*trained} == {folder.resolve() for folder in folders}
    assert len(trained) == 2
    for folder in folders:
        (written,) = folder.glob("wandb/offline-run-*/*.wandb")
        assert sweep.name.encode() in written.read_bytes(), "the name of the sweep is the group"
        assert (folder / "report.html").exists()

    (tiny,) = (path for path, row in trained.items() if "optimizer=adamw_tiny" in row["overrides"])
    (runner.folder / "alone").rename(alone)
    assert runner.losses(tiny.name) == runner.losses("x")[:5]
    assert runner.weights(tiny.name, 5) == runner.weights("x", 5)

    shown = done.stdout + capfd.readouterr().out
    both_started = max(shown.index(log) for log in (".log)",))
    assert both_started < shown.index("finished after")
    assert shown.count(f" s, step 5/5, loss {runner.losses(tiny.name)[-1][1]:.4f}") == 1
    assert shown.count(" s, step 5/5, loss ") == 2
    assert "step 1/" not in shown
    logs = [file.read_text() for file in sweep.rglob("*.log")]
    assert len(logs) == 2
    assert all("complete at step 5" in log for log in logs)
    assert all(f"--config-dir {mine.parent}" in log for log in logs)

    assert report.main([str(sweep)]) == 0
    assert (sweep / "comparison.html").exists()
    shown = capfd.readouterr().out
    assert "optimizer.lr" in shown
    assert all(folder.name in shown for folder in folders)


def test_train_the_points_with_the_basic_launcher(runner):
    done = runner.run("-m", "hydra/launcher=basic", "run.steps=1", "optimizer.beta2=0.95,0.99")
    assert done.returncode == 0, done.stderr
    assert len(_folders(runner)) == 2


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["run.name=x", "optimizer.lr=1e-3,2e-3"], "has the run directory runs/x of"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (["parallelism.tp=1,3"], "parallelism.tp=3 does not divide"),
                (["+sweep=beta2,init"], "start one sweep with +sweep=init alone"),
                (["batch.micro_batch_size=1,2"], "has the run directory runs/tiny-"),
                (
                    [
                        *("hydra.launcher.jobs=2", "hydra.launcher.cores=1"),
                        *("parallelism.tp=2", "run.name=x,y"),
                    ],
                    "run.name=y] 2 processes of 1 threads need 2 cores, and hydra.launcher.cores=1",
                ),
            ]
        ),
    ],
)
def test_refuse_a_sweep_with_an_invalid_point(runner, refused, overrides, sentence):
    refused(runner.run("-m", "run.steps=1", *overrides), sentence)
    assert not _folders(runner)


@pytest.mark.slow
def test_sigint_saves_all_parallel_points_and_starts_no_other(runner):
    sweep = runner.start(
        *("-m", "hydra.launcher.jobs=2", "hydra.launcher.cores=2", "run.name=a,b,c"),
        "schedule.total_steps=5000",
    )
    while sweep.poll() is None and not all(runner.rows(name, "metrics.jsonl") for name in "ab"):
        time.sleep(0.02)
    os.kill(sweep.pid, signal.SIGINT)
    _, err = sweep.communicate()
    assert sweep.returncode == 75, err
    assert "hlat: of 3 points 2 were interrupted, 1 were not started\n" in err
    for name in "ab":
        events = [row["event"] for row in runner.rows(name, "events.jsonl")]
        assert events.count("interrupt") == 1
        assert events[-1] == "interrupt"
    assert not (runner.folder / "runs/c").exists()


@pytest.mark.slow  # one or more whole processes
def test_check_the_points_before_slurm(runner, refused, monkeypatch):
    monkeypatch.setenv("PATH", str(runner.folder))
    arguments = ("hydra/launcher=slurm", "run.steps=1")
    refused(
        runner.run("-m", *arguments, "parallelism.tp=1,3"),
        "parallelism.tp=3] parallelism.tp=3 does",
    )
    for flags in ([], ["-m"]):
        refused(runner.run(*flags, *arguments, "run.name=x"), "sbatch is not on the PATH")
    assert not [*runner.folder.glob("runs/x/submissions/*")]


@pytest.mark.slow
def test_print_the_scripts_of_a_dry_run_without_slurm(runner, monkeypatch):
    monkeypatch.setenv("PATH", str(runner.folder))
    arguments = ("hydra/launcher=slurm", "hydra.launcher.dry_run=true", "run.name=a,b")
    done = runner.run("-m", *arguments, "+hydra.launcher.options.qos=high")
    assert done.returncode == 0, done.stderr
    (file,) = (runner.folder / "runs/sweeps").rglob("*.sh")
    script = file.read_text()
    assert file.parts[-3:] == ("dry_run", "1", "0.sh")
    assert script in done.stdout
    assert {"#SBATCH --qos=high", "#SBATCH --array=0-1"} <= {*script.splitlines()}
    assert not [*runner.folder.rglob("submissions"), *runner.folder.rglob("*.zip")]


NODES = ("hardware.processes_per_node=1", "hardware.nodes=1,2")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (NODES, "since hardware.nodes does not change the name of a run; add run.name='NAME-${h"),
        (("hardware=cpu,trn1_32xl", *NODES), "hardware does not change the name of a run; set run"),
        (("run.seed=1,1",), "run.seed=1]; remove the duplicate"),
        (("hydra.launcher.nodes=1,2",), "did you mean hardware.nodes?"),
        (
            ("hydra.launcher.time=60,120",),
            "all points of a sweep have the same hydra.launcher.time",
        ),
        (("hydra.launcher.options.qos=x",), "write +hydra.launcher.options.qos=VALUE"),
    ],
)
@pytest.mark.slow_after(3)
def test_refuse_points_with_advice(arguments, problem, runner, refused):
    refused(runner.run("-m", "hydra/launcher=slurm", *arguments), problem)


@pytest.mark.slow  # one or more whole processes
def test_complete_an_interrupted_submission_to_slurm(runner, monkeypatch):
    programs, limit = runner.folder / "programs", runner.folder / "limit"
    programs.mkdir()
    for name, script in (("sbatch", SBATCH), ("squeue", "#!/bin/sh\ncat queue"), ("srun", "")):
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    (runner.folder / "queue").touch()
    limit.write_text("1")
    arguments = ("-m", "hydra/launcher=slurm", "run.name=a,b")
    done = runner.run(*arguments)
    assert done.returncode == 2
    problem, advice, command = done.stderr.splitlines()[-3:]
    assert "sbatch: error: job limit" in problem
    assert advice == "hlat: submitted 1 of 2 jobs; submit the others with"
    assert done.stdout.count(" trains runs/") == 1
    assert not (runner.folder / "runs/b").exists()
    limit.write_text("9")
    words = shlex.split(command)
    done = runner.run(*words[words.index("train") + 1 :], small=False)
    assert done.returncode == 0, done.stderr
    first, second, _, total, listing = done.stdout.splitlines()
    assert first == "[0] job 0_0 of runs/a exists: PENDING"
    assert second.startswith("[1] job 1 trains runs/b")
    assert total == "submitted 1 of 2 jobs; 1 exist"
    log = runner.folder / shlex.split(listing)[-1] / "sweep.jsonl"
    points = [json.loads(line) for line in log.read_text().splitlines()]
    assert [point["job"] for point in points] == ["0_0", "0_0", "1"]
    archives = [*runner.folder.rglob("*.zip")]
    assert [path.parent for path in archives] == [log.parent]
    changed = runner.run(*arguments, "run.steps=3")
    assert changed.returncode == 2
    assert changed.stderr.count("is PENDING; cancel it with hlat jobs cancel") == 2


@pytest.mark.slow
def test_refuse_slurm_for_precompile(hlat):
    done = hlat("precompile", "hydra/launcher=slurm", "-m")
    assert done.returncode == 2
    assert "hydra/launcher=slurm runs hlat.train, not hlat.precompile" in done.stderr


def test_refuse_a_study_without_multirun(runner, refused):
    refused(runner.run("+sweep=beta2"), "optimizer.beta2, precision, run.seed are not set; add -m")


@pytest.mark.slow
def test_sigint_saves_the_point_and_stops_the_sweep(runner):
    sweep = runner.start("-m", "optimizer.lr=1e-3,2e-3")
    rows = []
    while not rows and sweep.poll() is None:
        rows = [
            row for folder in _folders(runner) for row in runner.rows(folder.name, "metrics.jsonl")
        ]
        time.sleep(0.02)
    os.kill(sweep.pid, signal.SIGINT)
    out, err = sweep.communicate()
    assert sweep.returncode == 75, err
    assert "[1 of 2] interrupted, exit code 75, after " in out
    (folder,) = _folders(runner)
    assert runner.rows(folder.name, "events.jsonl")[-1]["event"] == "interrupt"


@pytest.mark.slow
def test_refuse_a_sweep_without_a_valid_point(runner, refused):
    arguments = ("hydra.launcher.prune=true", "parallelism.tp=3,5")
    refused(runner.run("-m", *arguments), "parallelism.tp=5 does not divide")
    assert not _folders(runner)
