"""Secrets of the environment and of interpolations are in no file and in no output."""

import json
from pathlib import Path

import pytest

from hlat import export
from hlat.checkpoint import __main__ as checkpoint_command
from hlat.report import __main__ as report
from tests.run.conftest import call_command

CANARY = "canary-5f2d9c"
VARIABLES = [
    "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "OPENAI_API_KEY", "MY_PASSWORD",
]  # fmt: skip


def find_files_with_canary(folder: Path) -> list[str]:
    """Return the files below a folder with a canary in their name or content."""
    return [
        str(path)
        for path in folder.rglob("*")
        if CANARY in str(path.relative_to(folder))
        or (path.is_file() and CANARY.encode() in path.read_bytes())
    ]


def lines_with_canary(folder: Path) -> list[str]:
    """Return the lines of all files below a folder that contain a canary."""
    return [
        f"{path.name}: {line.decode(errors='replace')}"
        for path in folder.rglob("*")
        if path.is_file()
        for line in path.read_bytes().split(b"\n")
        if CANARY.encode() in line
    ]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, runner) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, f"{CANARY}-{name}")
        runner.environment[name] = f"{CANARY}-{name}"


@pytest.mark.slow  # 5 s: trains, plans and reports
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_write_no_variable_of_the_environment(
    environment: None, runner, without_figures, capfd: pytest.CaptureFixture[str], dp: int
) -> None:
    """Include two processes, which write logs of ranks."""
    run = ["run.name=x", "run.steps=5", "data.workers=1"]
    done = runner.run(*run) if dp == 1 else runner.run_process(*run, f"parallelism.dp={dp}")
    assert done.returncode == 0, done.stderr
    assert report.main([str(runner.folder / "runs/x")]) == 0
    out = runner.folder / "out"
    assert export.main([str(runner.folder / "runs/x"), "--output", str(out)]) == 0
    assert CANARY not in done.stdout + done.stderr + "".join(capfd.readouterr())
    assert find_files_with_canary(runner.folder) == []


def test_write_no_value_of_an_interpolation(
    environment: None, runner, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files contain the expression of a path with a secret, not its value, including those that the
    libraries of W&B and TensorBoard write.
    """
    link = runner.folder.parent / f"{CANARY}-WANDB_API_KEY"
    link.symlink_to(corpus)
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
    assert find_files_with_canary(runner.folder) == []


@pytest.mark.slow  # two runs with W&B
def test_redact_paths_and_notes(
    environment: None, runner, without_figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a secret in directories and notes: it is in names of directories, in no content, and a
    resumed run and a report find the files."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    secret = "${oc.env:MY_PASSWORD}"
    run = [
        "run.name=x", f"run.root='runs/{secret}'", f"checkpoint.destination='saved/{secret}/y'",
        f"tracking.wandb.notes='the password is {secret}'", f"tracking.wandb.tags=['{secret}']",
        "tracking.services=[wandb,tensorboard]", "data.workers=1",
    ]  # fmt: skip
    first = runner.run(*run, "run.steps=5")
    resumed = runner.run(*run, "run.steps=10")
    assert (first.returncode, resumed.returncode) == (0, 0), first.stderr + resumed.stderr
    assert CANARY not in first.stdout + first.stderr + resumed.stdout + resumed.stderr
    run_dir = runner.folder / f"runs/{CANARY}-MY_PASSWORD/x"
    events = (run_dir / "events.jsonl").read_text()
    assert (events.count('"event": "start"'), events.count('"event": "resume"')) == (1, 1)
    assert (runner.folder / f"saved/{CANARY}-MY_PASSWORD/y/x/checkpoints/step_00000010").is_dir()
    assert lines_with_canary(runner.folder) == []
    written = [*run_dir.glob("wandb/offline-run-*/*.wandb")]
    assert len(written) == 2
    assert all(f"the password is {secret}".encode() in file.read_bytes() for file in written)
    for main, arguments in (
        (report.main, [str(run_dir)]),
        (checkpoint_command.main, ["ls", str(run_dir)]),
        (checkpoint_command.main, ["prune", str(run_dir), "keep_last=1"]),
    ):
        result = call_command(main, runner.folder, *arguments)
        assert result.code == 0, result.err
        assert CANARY not in result.out + result.err
    assert lines_with_canary(runner.folder) == []


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optimizer.lr", "could not be converted to Float"),
        ("optimizer.name", "optimizer.name"),
        ("data.tokenizer", "data.tokenizer"),
        ("checkpoint.destination", "checkpoint.destination"),
    ],
)
def test_redact_error_messages(environment: None, runner, key: str, message: str) -> None:
    done = runner.run("run.name=x", f"{key}='s3x://${{oc.env:MY_PASSWORD}}'")
    assert done.returncode == 2, done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert "${oc.env:MY_PASSWORD}" in done.stderr
    assert message in done.stderr


@pytest.mark.slow  # two processes
def test_redact_messages_of_ranks(environment: None, runner) -> None:
    """Check files and messages of two ranks and their supervisor."""
    runner.environment["MY_PASSWORD"] = f"{CANARY} first line\n{CANARY} second line"
    overrides = ["run.name=x", "parallelism.dp=2", "data.root='/nowhere/${oc.env:MY_PASSWORD}'"]
    done = runner.run_process(*overrides)
    assert done.returncode == 2, done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert "${oc.env:MY_PASSWORD}" in done.stderr
    assert lines_with_canary(runner.folder) == []
