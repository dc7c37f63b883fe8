"""A multirun checks every point, then starts one process per point, each in a run folder of its own."""

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


def test_every_point_has_its_run_in_one_group_and_one_report(runner, capsys):
    runner.environment["WANDB_MODE"] = "offline"
    words = ("run.steps=1", "optimizer.beta2=0.95,0.99", "tracking=wandb")
    done = runner.run_process("-m", *words)
    assert done.returncode == 0, done.stderr
    assert len(_folders(runner)) == 2
    assert all((folder / "report.html").exists() for folder in _folders(runner))
    (sweep,) = (runner.folder / "runs/sweeps").iterdir()
    for folder in _folders(runner):
        (written,) = folder.glob("wandb/offline-run-*/*.wandb")
        assert sweep.name.encode() in written.read_bytes(), "W&B shows them together"
    assert report.main([str(sweep)]) == 0
    assert (sweep / "comparison.html").exists()
    told = capsys.readouterr().out
    assert "optimizer.beta2" in told
    assert all(folder.name in told for folder in _folders(runner))


def test_a_sweep_over_choices_of_ones_own(runner):
    mine = runner.folder / "mine/optimizer"
    mine.mkdir(parents=True)
    (mine / "fast.yaml").write_text("lr: 1e-2\n")
    done = runner.run_process(
        "-m", f"--config-dir={mine.parent}", "run.steps=1", "optimizer=fast,tiny"
    )
    assert done.returncode == 0, done.stderr
    assert len(_folders(runner)) == 2
    assert f"--config-dir {mine.parent}" in done.stdout


def test_hydras_own_launcher_runs_every_point_too(runner):
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
def test_one_bad_point_stops_the_sweep_before_the_first(runner, refused, overrides, sentence):
    refused(runner.run("-m", "run.steps=1", *overrides), sentence)
    assert not _folders(runner)


def test_points_at_once_train_what_they_train_one_by_one(runner):
    runner.environment["OMP_NUM_THREADS"] = "1"
    alone = runner.run_process("-m", "run.steps=6", "run.name=c")
    assert alone.returncode == 0, alone.stderr
    done = runner.run_process(
        "-m", "hydra.launcher.jobs=2", "hydra.launcher.cores=2", "run.steps=6", "run.name=a,b"
    )
    assert done.returncode == 0, done.stderr
    assert runner.losses("a") == runner.losses("b") == runner.losses("c")
    assert runner.weights("a", 6) == runner.weights("b", 6) == runner.weights("c", 6)
    both_started = done.stdout.index("1.log)")
    assert both_started < done.stdout.index("finished after")
    last = runner.losses("a")[-1][1]
    assert done.stdout.count(f" s, step 6/6, loss {last:.4f}\n") == 2
    assert "step 1/" not in done.stdout
    for log in ("0.log", "1.log"):
        (file,) = (runner.folder / "runs/sweeps").rglob(log)
        assert "complete at step 6" in file.read_text()


def test_ctrl_c_saves_all_that_run_at_once_and_starts_no_other(runner):
    sweep = runner.start(
        *("-m", "hydra.launcher.jobs=2", "hydra.launcher.cores=2", "run.name=a,b,c"),
        "schedule.total_steps=5000",
    )
    while sweep.poll() is None and not all(runner.rows(name, "metrics.jsonl") for name in "ab"):
        time.sleep(0.01)
    os.kill(sweep.pid, signal.SIGINT)
    _, err = sweep.communicate()
    assert sweep.returncode == 75, err
    assert "hlat: of 3 points 2 were interrupted, 1 were not started\n" in err
    for name in "ab":
        events = [row["event"] for row in runner.rows(name, "events.jsonl")]
        assert events.count("interrupt") == 1
        assert events[-1] == "interrupt"
    assert not (runner.folder / "runs/c").exists()


def test_slurm_is_asked_about_sound_points_only(runner, refused):
    runner.environment["PATH"] = str(runner.folder)
    words = ("hydra/launcher=slurm", "run.steps=1")
    refused(
        runner.run_process("-m", *words, "parallelism.tp=1,3"),
        "parallelism.tp=3] parallelism.tp=3 does",
    )
    for flags in ([], ["-m"]):
        refused(runner.run_process(*flags, *words, "run.name=x"), "sbatch is not on the PATH")
    assert not [*runner.folder.glob("runs/x/submissions/*")]


def test_slurm_runs_training_only(hlat):
    done = hlat("precompile", "hydra/launcher=slurm", "-m")
    assert done.returncode == 2
    assert "hydra/launcher=slurm runs hlat.train, not hlat.precompile" in done.stderr


def test_a_study_without_multirun_is_refused(runner, refused):
    refused(runner.run("+sweep=beta2"), "optimizer.beta2, precision, run.seed are not set; add -m")


def test_ctrl_c_in_a_sweep_saves_the_point_and_stops(runner):
    sweep = runner.start("-m", "optimizer.lr=1e-3,2e-3")
    rows = []
    while not rows and sweep.poll() is None:
        rows = [
            row for folder in _folders(runner) for row in runner.rows(folder.name, "metrics.jsonl")
        ]
        time.sleep(0.01)
    os.kill(sweep.pid, signal.SIGINT)
    out, err = sweep.communicate()
    assert sweep.returncode == 75, err
    assert "interrupted and saved" in out
    (folder,) = _folders(runner)
    assert runner.rows(folder.name, "events.jsonl")[-1]["event"] == "interrupt"


def test_points_that_cannot_run_are_left_out_and_listed(runner):
    done = runner.run_process(
        "-m", "hydra.launcher.prune=true", "run.steps=1", "parallelism.tp=3,1", "optimizer.lr=1e-3"
    )
    assert done.returncode == 0, done.stderr
    assert "parallelism.tp=3 optimizer.lr=0.001] parallelism.tp=3 does not divide" in done.stdout
    (record,) = (runner.folder / "runs/sweeps").glob("*/sweep.jsonl")
    left_out, ran = map(json.loads, record.read_text().splitlines())
    assert "parallelism.tp=3" in left_out["overrides"]
    assert "does not divide" in left_out["problems"][0]
    assert [folder.resolve() for folder in _folders(runner)] == [Path(ran["run_folder"])]


def test_a_sweep_of_which_no_point_can_run_is_refused(runner, refused):
    words = ("hydra.launcher.prune=true", "parallelism.tp=3,5")
    refused(runner.run_process("-m", *words), "parallelism.tp=5 does not divide")
    assert not _folders(runner)
