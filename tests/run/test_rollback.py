"""A run killed at each point of a rollback has the losses of an uninterrupted run, bit for bit."""

import hashlib
import json
import signal
from pathlib import Path

import pytest

from hlat.engine.native.native_engine import NativeEngine
from tests.run.conftest import Runner
from tests.run.test_processes import inject

pytestmark = pytest.mark.slow

SETTINGS = (
    *("recovery.spike_window=4", "recovery.rollback_after=3", "recovery.spike_margin=2"),
    *("checkpoint.asynchronous=false", "checkpoint.every_steps=5", "checkpoint.keep_last=9"),
    "run.repeat=true",
)
BAD_STEPS = (9, 10, 11)
SKIPPED = [8, 11]
"""Batches of the bad steps. The checkpoint of step 10 is bad, so the run returns to step 5."""
POINTS = (
    "before quarantine_checkpoints",
    "after quarantine_checkpoints",
    "after save_rollbacks",
    "before load_checkpoint",  # after the event
    "before training step 13",  # two steps after the rollback
    "before training step 18",  # after the next save, at step 10
)
INJECTED = """
import hashlib, os, signal
from dataclasses import replace
from hlat.checkpoint import checkpoint_store, retention, rollback_log
from hlat.engine.native.native_engine import NativeEngine

train_step, read_metrics, trained = NativeEngine.train_step, NativeEngine.read_metrics, []

def kill_at(point):
    if point == {point!r}:
        os.kill(os.getpid(), signal.SIGKILL)

def patched_step(self, sequences, *arguments):
    trained.append(hashlib.sha256(sequences.tokens.tobytes()).hexdigest())
    kill_at(f"before training step {{len(trained)}}")
    return train_step(self, sequences, *arguments)

def patched_read(self, pending):
    metrics = read_metrics(self, pending)
    is_bad = "grad_norm" in pending and trained[-1] in {bad!r}
    return replace(metrics, grad_norm=metrics.grad_norm + 100) if is_bad else metrics

def patch(module, name):
    function = getattr(module, name)
    def patched(*arguments, **settings):
        kill_at(f"before {{name}}")
        result = function(*arguments, **settings)
        kill_at(f"after {{name}}")
        return result
    setattr(module, name, patched)

NativeEngine.train_step, NativeEngine.read_metrics = patched_step, patched_read
patch(retention, "quarantine_checkpoints")
patch(rollback_log, "save_rollbacks")
patch(checkpoint_store, "load_checkpoint")
"""


@pytest.fixture
def bad_batches(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the digests of the batches of the bad steps."""
    train_step, trained = NativeEngine.train_step, list[str]()

    def step(self, sequences, *arguments):
        trained.append(hashlib.sha256(sequences.tokens.tobytes()).hexdigest())
        return train_step(self, sequences, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "train_step", step)
        runner.run("run.name=plain", *SETTINGS, f"run.steps={BAD_STEPS[-1]}")
    return [trained[step - 1] for step in BAD_STEPS]


@pytest.fixture
def run_with_kill(runner: Runner, bad_batches: list[str], tmp_path: Path):
    """Return a function that runs until it is killed at a point; without a point, to the end."""

    def run(name: str, point: str = "", *overrides: str) -> None:
        inject(runner, tmp_path, INJECTED.format(bad=bad_batches, point=point))
        done = runner.run_process(f"run.name={name}", *SETTINGS, *overrides)
        assert done.returncode == (-signal.SIGKILL if point else 0), done.stderr

    return run


def load_state(runner: Runner, name: str, step: int) -> dict:
    path = runner.folder / f"runs/{name}/checkpoints/step_{step:08}/state.json"
    return json.loads(path.read_text())


def load_rollbacks(runner: Runner, name: str) -> list[dict]:
    return json.loads((runner.folder / f"runs/{name}/checkpoints/rollbacks.json").read_text())


def remove_rollback_events(runner: Runner, name: str) -> None:
    path = runner.folder / f"runs/{name}/events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"event": "rollback"' not in line))


def test_kill_at_each_point_of_a_rollback(runner, run_with_kill) -> None:
    run_with_kill("whole")
    assert load_rollbacks(runner, "whole") == [{"to": 5, "skipped": SKIPPED}]
    assert load_state(runner, "whole", 5)["data"]["skipped"] == []
    assert load_state(runner, "whole", 20)["data"]["skipped"] == [SKIPPED]
    whole = runner.losses("whole")
    assert len(whole) == 20
    for number, point in enumerate(POINTS):
        name = f"killed_{number}"
        run_with_kill(name, point)
        run_with_kill(name)
        assert runner.losses(name) == whole, point
        assert load_rollbacks(runner, name) == [{"to": 5, "skipped": SKIPPED}], point
        assert runner.weights(name, 20) == runner.weights("whole", 20), point


def test_a_resume_needs_no_events(runner, run_with_kill) -> None:
    run_with_kill("whole")
    for name, point in (("before_save", POINTS[4]), ("after_save", POINTS[5])):
        run_with_kill(name, point)
        remove_rollback_events(runner, name)
        if name == "after_save":
            (runner.folder / f"runs/{name}/checkpoints/rollbacks.json").unlink()
        run_with_kill(name)
        assert runner.losses(name) == runner.losses("whole"), name


def test_a_resume_from_a_checkpoint_before_the_rollback(runner, run_with_kill) -> None:
    """The checkpoint saved after the rollback is damaged, and the older one lacks the batches."""
    run_with_kill("whole")
    run_with_kill("x", POINTS[5])
    weights = runner.folder / "runs/x/checkpoints/step_00000010/rank_00000.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    run_with_kill("x")
    resumes = [row for row in runner.rows("x", "events.jsonl") if row["event"] == "resume"]
    assert [row["step"] for row in resumes] == [5]
    assert runner.losses("x") == runner.losses("whole")


def test_a_branch_skips_the_batches_of_its_checkpoint(runner, run_with_kill) -> None:
    run_with_kill("whole")
    source = runner.folder / "runs/whole/checkpoints"
    run_with_kill("after", "", f"checkpoint.start_from={source}/step_00000010")
    assert runner.losses("after") == runner.losses("whole")[10:]
    assert load_state(runner, "after", 20)["data"]["skipped"] == [SKIPPED]
    # Another run's later decisions do not affect a branch from before: it decides itself
    run_with_kill("before", "", f"checkpoint.start_from={source}/step_00000005", "run.steps=8")
    assert load_state(runner, "before", 8)["data"]["skipped"] == []
