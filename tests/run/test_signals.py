"""Each signal of a scheduler, sent to each process of a run, and the exact continuation after it."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat.config.config_errors import ExitCode
from hlat.distributed.process_signals import STOP_SIGNALS
from tests.run.conftest import Runner
from tests.run.test_processes import children

pytestmark = [
    pytest.mark.slow,  # unit tests of signal_handler.py, and one signal in test_resume.py
    pytest.mark.distributed,
    pytest.mark.xdist_group("processes"),
]
LAYOUTS = {
    "single": (),
    "supervised": ("recovery.max_restarts=2",),
    "dp2": ("recovery.max_restarts=2", "parallelism.dp=2"),
}
Send = Callable[["subprocess.Popen[str]", signal.Signals], None]


def send_to_group(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    os.killpg(process.pid, number)


def send_to_worker(rank: int) -> Send:
    def send(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
        os.kill(sorted(children(process))[rank], number)

    return send


def send_to_all(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Send a signal to the command and its descendants, data workers included, as Slurm does."""
    ids = subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, text=True).stdout
    workers = children(process)
    for worker in workers or [process.pid]:
        found = subprocess.run(["pgrep", "-P", str(worker)], capture_output=True, text=True)
        ids += found.stdout
    for process_id in {*map(int, ids.split()), *workers}:
        os.kill(process_id, number)


def send_twice(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)


TARGETS: dict[str, Send] = {
    "command": subprocess.Popen.send_signal,
    "group": send_to_group,
    "all": send_to_all,
    "twice": send_twice,
    "worker 0": send_to_worker(0),
    "worker 1": send_to_worker(1),
}
CASES = [
    *(("single", target, number) for target in ("command", "group") for number in STOP_SIGNALS),
    *(
        ("dp2", target, number)
        for target in ("command", "group", "worker 0", "worker 1")
        for number in STOP_SIGNALS
    ),
    *(("single", target, signal.SIGUSR1) for target in ("all", "twice")),
    *(("supervised", target, signal.SIGUSR1) for target in ("group", "all", "worker 0")),
    *(("dp2", target, signal.SIGXCPU) for target in ("all", "twice")),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory, small) -> dict[str, list[tuple[int, float]]]:
    """Train each layout without a signal; return the losses."""
    runner = Runner(tmp_path_factory.mktemp("references"), small)
    for layout, overrides in LAYOUTS.items():
        assert runner.run_process(f"run.name={layout}", *overrides).returncode == 0
    return {layout: runner.losses(layout) for layout in LAYOUTS}


@pytest.mark.parametrize(("layout", "target", "number"), CASES)
def test_save_after_a_signal_and_continue(
    runner, references, layout: str, target: str, number: signal.Signals
) -> None:
    overrides = ("run.name=x", "data.workers=1", "checkpoint.every_steps=1", *LAYOUTS[layout])
    stopped = runner.run_until(7, number, *overrides, send=TARGETS[target])
    assert stopped.returncode == ExitCode.PREEMPTED, stopped.stderr
    last = runner.rows("x", "events.jsonl")[-1]
    assert (last["event"], last["signal"]) == ("interrupt", number.name)
    checkpoints = [path.name for path in (runner.folder / "runs/x/checkpoints").iterdir()]
    assert f"step_{last['step']:08}" in checkpoints
    assert runner.run_process(*overrides).returncode == 0
    assert runner.losses("x") == references[layout]
    assert not any(row["event"] == "restart" for row in runner.rows("x", "events.jsonl"))


@pytest.mark.parametrize(
    ("layout", "target"),
    [("single", "command"), ("single", "twice"), ("dp2", "command"), ("dp2", "worker 1")],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_during_setup_and_start_again(
    runner, references, layout: str, target: str, number: signal.Signals
) -> None:
    """Send a signal after a worker has locked the run directory."""
    process = runner.start("run.name=x", *LAYOUTS[layout], start_new_session=True)
    wait_for(runner.folder / "runs/x/.lock", process)
    if "worker" in target:
        wait_for(runner.folder / "runs/x/events.jsonl", process)
    TARGETS[target](process, number)
    _, errors = process.communicate()
    assert process.returncode == ExitCode.PREEMPTED, errors
    assert "Traceback" not in errors
    assert runner.run_process("run.name=x", *LAYOUTS[layout]).returncode == 0
    assert runner.losses("x") == references[layout]


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("layout", "target"), [("single", "command"), ("dp2", "command"), ("dp2", "worker 1")]
)
def test_write_stacks_on_sigquit_and_continue(runner, references, layout, target) -> None:
    done = runner.run_until(7, signal.SIGQUIT, "run.name=x", *LAYOUTS[layout], send=TARGETS[target])
    assert done.returncode == 0, done.stderr
    assert runner.losses("x") == references[layout]
    stacks = done.stderr
    if layout == "dp2":
        file = runner.folder / "runs/x/logs/node_0.stacks"
        assert f"hlat: stacks of all ranks are in {file.relative_to(runner.folder)}" in stacks
        stacks = file.read_text()
        assert stacks.count("rank 0:\n") == stacks.count("rank 1:\n") == 1
    assert stacks.count("in run_worker") >= (2 if layout == "dp2" else 1)


def test_a_sweep_stops_after_a_signal(runner) -> None:
    overrides = ("-m", "run.seed=1,2", "run.name=x${run.seed}", "hydra.sweep.dir=sweep")
    process = runner.start(*overrides, start_new_session=True)
    wait_for(runner.folder / "runs/x1/metrics.jsonl", process)
    process.send_signal(signal.SIGXCPU)
    _, errors = process.communicate()
    assert process.returncode == ExitCode.PREEMPTED, errors
    assert runner.rows("x1", "events.jsonl")[-1]["signal"] == "SIGXCPU"
    assert not (runner.folder / "runs/x2").exists()
    shutil.rmtree(runner.folder / "sweep")
