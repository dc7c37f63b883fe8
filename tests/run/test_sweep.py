"""Sweeps: every point is checked, then each point is one process with its own run directory."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from hlat.report import __main__ as report


def _folders(runner):
    root = runner.folder / "runs"
    return [path for path in root.iterdir() if path.name != "sweeps"] if root.exists() else []


@pytest.mark.slow  # tests/contract/test_launchers.py trains points with this launcher
def test_train_the_valid_points_in_parallel_in_one_group(
    runner, runner_at_step_10, without_figures, monkeypatch, capfd
):
    """The points are choices of the user's own configuration directory; two are left out.

    One point is the run of runner_at_step_10, under the name `x`.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    alone = runner.folder / "runs/x"
    alone.rename(runner.folder / "alone")
    mine = runner.folder / "mine/optimizer"
    mine.mkdir(parents=True)
    (mine / "fast.yaml").write_text("lr: 1e-2\n")
    words = ("optimizer=fast,tiny", "batch.micro_batch_size=4,3", "hydra.launcher.prune=true")
    fixed = ("run.steps=5", "tracking=wandb", "hydra.launcher.jobs=2", "hydra.launcher.cores=2")
    done = runner.run("-m", f"--config-dir={mine.parent}", *words, *fixed)
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

    (tiny,) = (path for path, row in trained.items() if "optimizer=tiny" in row["overrides"])
    (runner.folder / "alone").rename(alone)
    assert runner.losses(tiny.name) == runner.losses("x")[:5]
    assert runner.weights(tiny.name, 5) == runner.weights("x", 5)

    shown = done.stdout + capfd.readouterr().out
    both_started = max(shown.index(log) for log in (".log)",))
    assert both_started < shown.index("finished after")
    assert shown.count(f" s, step 5/5, loss {runner.losses(tiny.name)[-1][1]:.4f}\n") == 1
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
        (["parallelism.tp=1,3"], "parallelism.tp=3 does not divide"),
        (["run.name=x", "optimizer.lr=1e-3,2e-3"], "has the run directory runs/x of"),
        (["batch.micro_batch_size=1,2"], "has the run directory runs/tiny-"),
        (
            ["hydra.launcher.jobs=2", "hydra.launcher.cores=1", "parallelism.tp=2", "run.name=x,y"],
            "run.name=y] 2 processes of 1 threads need 2 cores, and hydra.launcher.cores=1",
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


def test_check_the_points_before_slurm(runner, refused, monkeypatch):
    monkeypatch.setenv("PATH", str(runner.folder))
    words = ("hydra/launcher=slurm", "run.steps=1")
    refused(
        runner.run("-m", *words, "parallelism.tp=1,3"),
        "parallelism.tp=3] parallelism.tp=3 does",
    )
    for flags in ([], ["-m"]):
        refused(runner.run(*flags, *words, "run.name=x"), "sbatch is not on the PATH")
    assert not [*runner.folder.glob("runs/x/submissions/*")]


def test_refuse_slurm_for_precompile(hlat):
    done = hlat("precompile", "hydra/launcher=slurm", "-m")
    assert done.returncode == 2
    assert "hydra/launcher=slurm runs hlat.train, not hlat.precompile" in done.stderr


def test_refuse_a_study_without_multirun(runner, refused):
    refused(runner.run("+sweep=beta2"), "optimizer.beta2, precision, run.seed are not set; add -m")


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
    assert "interrupted and saved" in out
    (folder,) = _folders(runner)
    assert runner.rows(folder.name, "events.jsonl")[-1]["event"] == "interrupt"


def test_refuse_a_sweep_without_a_valid_point(runner, refused):
    words = ("hydra.launcher.prune=true", "parallelism.tp=3,5")
    refused(runner.run("-m", *words), "parallelism.tp=5 does not divide")
    assert not _folders(runner)
