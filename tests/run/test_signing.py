"""Runs and commands reject checkpoints without a signature of a trusted key."""

import pytest

from hlat import average, export
from hlat.checkpoint import checkpoint_signature
from tests.run.conftest import Runner, call_command

KEYS = ["checkpoint.signing_key=own.pem", "checkpoint.trusted_keys=own.pem.pub"]
TRUSTED = "trusted_keys=own.pem.pub"


@pytest.fixture
def signed(runner: Runner) -> Runner:
    """Return a runner with two key pairs and the run `x` of 4 steps with two signed checkpoints."""
    for name in ("own.pem", "other.pem"):
        checkpoint_signature.create_key_pair(runner.folder / name)
    done = runner.run("run.name=x", "run.steps=4", "checkpoint.every_steps=2", *KEYS)
    assert done.returncode == 0, done.stderr
    return runner


@pytest.mark.slow  # 3 s
def test_only_signed_checkpoints_are_read(signed: Runner) -> None:
    folder = signed.folder
    directory = folder / "runs/x/checkpoints"
    assert call_command(export.main, folder, "runs/x", "output=a", TRUSTED).code == 0
    arguments = ["runs/x", "last=2", "output=mean", TRUSTED, "signing_key=own.pem"]
    assert call_command(average.main, folder, *arguments).code == 0
    assert call_command(export.main, folder, "mean", "output=b", TRUSTED).code == 0

    # The newest has no signature: the run continues from the previous one
    (directory / "step_00000004/COMMITTED.sig").unlink()
    refused = call_command(export.main, folder, "runs/x", "step=4", "output=c", TRUSTED)
    assert refused.code == 2
    assert "step_00000004/COMMITTED.sig does not exist" in refused.err
    refused = call_command(average.main, folder, "runs/x", "last=2", "output=c", TRUSTED)
    assert refused.code == 2
    assert "step_00000004/COMMITTED.sig does not exist" in refused.err
    resumed = signed.run("run.name=x", "run.steps=4", "checkpoint.every_steps=2", *KEYS)
    assert resumed.returncode == 0, resumed.stderr
    assert "checkpoint step_00000004 is rejected" in resumed.stdout
    assert "resuming from runs/x/checkpoints/step_00000002" in resumed.stdout
    assert (directory / "step_00000004/COMMITTED.sig").exists()
    assert (directory / "step_00000004_damaged_1").is_dir()
    private = (folder / "own.pem").read_text().splitlines()[1]
    for file in (folder / "runs").rglob("*"):
        assert file.is_dir() or private.encode() not in file.read_bytes(), file


@pytest.mark.slow  # 6 s: three processes
def test_checkpoints_of_another_key_are_refused(signed: Runner) -> None:
    keys = ["checkpoint.signing_key=other.pem", "checkpoint.trusted_keys=other.pem.pub"]
    done = signed.run("run.name=x", "run.steps=6", *keys)
    assert done.returncode == 2
    assert "step_00000004/COMMITTED.sig is not a signature" in done.stderr
    start = "checkpoint.start_from=runs/x/checkpoints/step_00000004"
    done = signed.run("run.name=branch", "run.steps=6", start, *keys)
    assert done.returncode == 2
    assert "step_00000004/COMMITTED.sig is not a signature" in done.stderr
    done = signed.run("run.name=branch", "run.steps=5", start, *KEYS)
    assert done.returncode == 0, done.stderr
    assert call_command(export.main, signed.folder, "runs/x", "output=a").code == 0
    done = signed.run("run.name=tuned", "run.steps=1", "model.init_from=a", *KEYS)
    assert done.returncode == 2
    assert "model.init_from=a has no signature" in done.stderr


def test_keys_are_checked_before_the_first_step(runner: Runner) -> None:
    checkpoint_signature.create_key_pair(runner.folder / "own.pem")
    (runner.folder / "own.pem").chmod(0o644)
    done = runner.run("run.name=x", "run.steps=1", "checkpoint.signing_key=own.pem")
    assert done.returncode == 2
    assert "checkpoint.signing_key=own.pem: other users have access" in done.stderr
    assert runner.rows("x", "metrics.jsonl") == []
