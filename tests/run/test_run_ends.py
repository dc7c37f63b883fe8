"""Every end of a run in the reference has its exit code and its event, in a real process."""

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from hlat.config.override_keys import merge_overrides
from hlat.evaluate.checkpoint_watcher import has_run_ended
from hlat.tracking.lost_work import END_EVENTS, START_EVENTS
from tests.docs.test_reference import _load_generator
from tests.run.conftest import Runner

pytestmark = pytest.mark.slow  # one or more whole processes for each end
ENDS = {cause: (code, event) for cause, code, event in _load_generator().RUN_ENDS}
TRAIN = "import runpy; runpy.run_module('hlat.train', run_name='__main__', alter_sys=True)"
FULL_DISK = """
from hlat.checkpoint import checkpoint_store
def refuse(*arguments, **options):
    raise OSError(28, "No space left on device")
checkpoint_store.save_checkpoint = refuse
"""
BROKEN_STEP = """
from hlat.engine.native.native_engine import NativeEngine
NativeEngine.train_step = lambda *arguments: 1 / 0
"""
WRONG_DEVICE = """
from hlat.engine import device_checks
def multiply(one, other):
    result = one @ other
    result[-1, -1] += 1
    return result
device_checks._matmul = multiply
"""


def train(runner: Runner, *overrides: str, name: str = "x", fault: str = "") -> int:
    arguments = merge_overrides(runner.small, [f"run.name={name}", *overrides])
    done = subprocess.run(
        [sys.executable, "-c", f"{fault}\n{TRAIN}", *arguments],
        cwd=runner.folder,
        env=runner.environment,
        capture_output=True,
    )
    return done.returncode


def train_again(runner: Runner, name: str) -> int:
    assert train(runner, "run.steps=2") == 0
    return train(runner, "run.steps=2", name=name)


CAUSES: dict[str, Callable[[Runner], int]] = {
    "the last step is complete and saved": lambda runner: train(runner, "run.steps=2"),
    "the run had finished before": lambda runner: train_again(runner, "x"),
    "another run with the same settings, code and data had finished": (
        lambda runner: train_again(runner, "y")
    ),
    "the last state could not be saved": lambda runner: train(runner, fault=FULL_DISK),
    "an error in a process without a supervisor": lambda runner: train(runner, fault=BROKEN_STEP),
    "invalid configuration": lambda runner: train(runner, "batch.micro_batch_size=3"),
    "loss or gradients are not finite": lambda runner: train(
        runner, "optimizer.lr=1e30", "optimizer.grad_clip=0"
    ),
    "a node failed a check": lambda runner: train(runner, fault=WRONG_DEVICE),
    "SIGTERM": lambda runner: runner.run_until(3, signal.SIGTERM, "run.name=x").returncode,
    "SIGKILL": lambda runner: runner.run_until(3, signal.SIGKILL, "run.name=x").returncode,
}


def test_every_end_is_caused() -> None:
    assert CAUSES.keys() == ENDS.keys()


@pytest.mark.parametrize("cause", ENDS)
def test_exit_code_and_event_of_an_end(runner: Runner, cause: str) -> None:
    code, event = ENDS[cause]
    assert CAUSES[cause](runner) == code
    name = "y" if cause.startswith("another run") else "x"
    events = [row["event"] for row in runner.rows(name, "events.jsonl")]
    bounds = [each for each in events if each in (*START_EVENTS, *END_EVENTS, "exclude")]
    assert (bounds[-1:] == [event]) if event else not {*bounds} & {*END_EVENTS}
    has_ended = has_run_ended(runner.folder / "runs" / name)
    assert has_ended is (event in ("finish", "diverge"))
