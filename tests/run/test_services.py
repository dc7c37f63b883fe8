"""A resumed run is the same run in W&B, and a branch is another one."""

import json
from pathlib import Path

import pytest


def _name(folder: Path) -> str:
    return json.loads((folder / "services.json").read_text())["wandb"]


@pytest.mark.slow  # 6 s; test_metric_loggers.py resumes a run of W&B too
def test_resume_the_wandb_run_of_a_checkpoint(runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert runner.run("run.name=x", "run.steps=5", "tracking=wandb").returncode == 0
    x = runner.folder / "runs/x"
    name = _name(x)
    (x / "services.json").unlink()
    assert runner.run("run.name=x", "run.steps=6", "tracking=wandb").returncode == 0
    assert _name(x) == name
    assert len([*x.glob(f"wandb/offline-run-*-{name}")]) == 2
    origin = f"checkpoint.start_from={x}/checkpoints/step_00000005"
    done = runner.run("run.name=y", "run.steps=6", "tracking=wandb", origin)
    assert done.returncode == 0, done.stderr
    assert _name(runner.folder / "runs/y") != name
