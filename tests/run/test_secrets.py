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


def test_the_environment_leaves_no_trace(
    environment: None, runner, capfd: pytest.CaptureFixture[str]
) -> None:
    """In two processes with data workers, in which logs of ranks are files of the run."""
    run = ["run.name=x", "run.steps=5", "data.workers=1"]
    done = runner.run_process(*run, "parallelism.dp=2")
    assert done.returncode == 0, done.stderr
    assert report.main([str(runner.folder / "runs/x")]) == 0
    out = runner.folder / "out"
    assert export.main([str(runner.folder / "runs/x"), "--output", str(out)]) == 0
    assert CANARY not in done.stdout + done.stderr + "".join(capfd.readouterr())
    assert holding(runner.folder) == []


def test_what_an_interpolation_stands_for_is_not_written(
    environment: None, runner, corpus: Path
) -> None:
    """A path by way of a secret: the files hold the expression, where they hold it at all, and so
    do those that W&B's and TensorBoard's own libraries write."""
    place = runner.folder.parent / f"{CANARY}-WANDB_API_KEY"
    place.symlink_to(corpus)
    root = "data.root='${oc.env:PARENT}/${oc.env:WANDB_API_KEY}'"
    runner.environment |= {"PARENT": str(runner.folder.parent), "WANDB_MODE": "offline"}
    services = "tracking.services=[wandb,tensorboard]"
    done = runner.run_process("run.name=x", "run.steps=5", root, services)
    assert done.returncode == 0, done.stderr
    for service in ("wandb/offline-run-*/*.wandb", "tensorboard/events*"):
        (written,) = runner.folder.glob(f"runs/x/{service}")
        assert b"${oc.env:WANDB_API_KEY}" in written.read_bytes()
    assert "${oc.env:WANDB_API_KEY}" in (runner.folder / "runs/x/config.yaml").read_text()
    overrides = (runner.folder / "runs/x/overrides.yaml").read_text()
    assert json.dumps(root) in overrides
    assert CANARY not in done.stdout + done.stderr
    assert holding(runner.folder) == []
