"""A secret of the environment, or one that a configuration points to, is in no file and no line."""

import json
from pathlib import Path

import pytest

from hlat import export
from hlat.report import __main__ as report

CANARY = "canary-5f2d9c"
VARIABLES = [
    "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "OPENAI_API_KEY", "MY_PASSWORD",
]  # fmt: skip


def holding(folder: Path) -> list[str]:
    """Files below a folder, names included, that hold a canary."""
    return [
        str(path)
        for path in folder.rglob("*")
        if CANARY in str(path.relative_to(folder))
        or (path.is_file() and CANARY.encode() in path.read_bytes())
    ]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, runner) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, f"{CANARY}-{name}")
        runner.environment[name] = f"{CANARY}-{name}"


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_write_no_variable_of_the_environment(
    environment: None, runner, without_figures, capfd: pytest.CaptureFixture[str], dp: int
) -> None:
    """With two processes, the logs of ranks are files of the run."""
    run = ["run.name=x", "run.steps=5", "data.workers=1"]
    done = runner.run(*run) if dp == 1 else runner.run_process(*run, f"parallelism.dp={dp}")
    assert done.returncode == 0, done.stderr
    assert report.main([str(runner.folder / "runs/x")]) == 0
    out = runner.folder / "out"
    assert export.main([str(runner.folder / "runs/x"), "--output", str(out)]) == 0
    assert CANARY not in done.stdout + done.stderr + "".join(capfd.readouterr())
    assert holding(runner.folder) == []


def test_write_no_value_of_an_interpolation(
    environment: None, runner, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path by way of a secret: the files hold the expression, where they hold it at all, and so
    do those that W&B's and TensorBoard's own libraries write."""
    place = runner.folder.parent / f"{CANARY}-WANDB_API_KEY"
    place.symlink_to(corpus)
    root = "data.root='${oc.env:PARENT}/${oc.env:WANDB_API_KEY}'"
    monkeypatch.setenv("PARENT", str(runner.folder.parent))
    monkeypatch.setenv("WANDB_MODE", "offline")
    services = "tracking.services=[wandb,tensorboard]"
    done = runner.run("run.name=x", "run.steps=5", root, services)
    assert done.returncode == 0, done.stderr
    for service in ("wandb/offline-run-*/*.wandb", "tensorboard/events*"):
        (written,) = runner.folder.glob(f"runs/x/{service}")
        assert b"${oc.env:WANDB_API_KEY}" in written.read_bytes()
    assert "${oc.env:WANDB_API_KEY}" in (runner.folder / "runs/x/config.yaml").read_text()
    overrides = (runner.folder / "runs/x/overrides.yaml").read_text()
    assert json.dumps(root) in overrides
    assert CANARY not in done.stdout + done.stderr
    assert holding(runner.folder) == []
