"""A run over the nodes of a job: one supervisor on each, which decide together.

Two supervisors on this machine are given the environment of two nodes; tests/slurm has nodes.
"""

import signal
import socket
import subprocess
import sys

import pytest

from tests.run.test_processes import inject, wait_for_step

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

NODES = ("hardware.nodes=2", "hardware.processes_per_node=1", "parallelism.tp=2")
LONG = "schedule.total_steps=100000"
IN_STEP_7 = """
import os
if os.environ.get("RANK") == "1":
    from hlat.engine.native.native_engine import NativeEngine
    whole, steps = NativeEngine.train_step, []
    def train_step(self, *arguments):
        steps.append(1)
        if len(steps) == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            {statement}
        return whole(self, *arguments)
    NativeEngine.train_step = train_step
"""
SHORT_TIMEOUTS = """
import os
if "RANK" not in os.environ:
    from hlat.recovery import failure_coordinator
    failure_coordinator._REPORT_TIMEOUT_S = failure_coordinator._ACKNOWLEDGE_TIMEOUT_S = 1.0
"""


class Nodes:
    """Supervisors that a launcher starts on each node."""

    def __init__(self, runner) -> None:
        self.runner = runner

    def inject(self, statement: str) -> None:
        """Execute a statement in step 7 of rank 1, before any restart."""
        inject(self.runner, self.runner.folder, IN_STEP_7.format(statement=statement))

    def start(self, *overrides: str, nodes: int = 2) -> list["subprocess.Popen[str]"]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        variables = {
            "HLAT_NODES": str(nodes),
            "HLAT_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "HLAT_STOP": str(self.runner.folder / "stop"),
        }
        return [
            subprocess.Popen(
                [sys.executable, "-m", "hlat.train", *self.runner.small, *NODES, *overrides],
                cwd=self.runner.folder,
                env=self.runner.environment | variables | {"HLAT_NODE": str(number)},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for number in range(nodes)
        ]

    def run(self, *overrides: str) -> tuple[list[int], list[str]]:
        """Return exit codes and errors of all nodes."""
        started = self.start(*overrides)
        output = [process.communicate(timeout=300) for process in started]
        return [process.returncode for process in started], [err for _, err in output]


@pytest.fixture
def nodes(runner):
    inject(runner, runner.folder, "")
    return Nodes(runner)


@pytest.mark.slow  # test_faults.py: one process restarts after it is killed
def test_restart_all_nodes_after_a_process_is_killed(nodes, runner, uninterrupted):
    nodes.inject("os.kill(os.getpid(), 9)")
    codes, errors = nodes.run("run.name=x", "recovery.max_restarts=1")
    assert codes == [0, 0], errors
    assert "rank 1 was killed by SIGKILL; restarting from the newest checkpoint" in errors[0]
    assert "SIGKILL" not in errors[1]
    restarts = [row for row in runner.rows("x", "events.jsonl") if row["event"] == "restart"]
    assert [row["reason"] for row in restarts] == ["rank 1 was killed by SIGKILL"]
    for found, expected in zip(runner.losses("x"), uninterrupted.losses("whole"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow  # test_processes.py: an exception in one of two processes
def test_end_all_nodes_with_the_exception_of_one(nodes):
    nodes.inject("raise ValueError('no')")
    codes, errors = nodes.run("run.name=x")
    assert codes == [1, 1], errors
    assert "ValueError: no" in errors[0]


@pytest.mark.slow  # two processes save after SIGTERM in test_processes.py
def test_save_on_all_nodes_when_the_stop_file_appears(nodes, runner):
    started = nodes.start("run.name=x", LONG)
    wait_for_step(runner, started[0])
    (runner.folder / "stop").touch()
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [75, 75], errors
    assert runner.rows("x", "events.jsonl")[-1]["event"] == "interrupt"


@pytest.mark.slow  # test_processes.py: one of two processes is killed
def test_end_the_other_node_after_one_is_lost(nodes, runner):
    runner.environment.pop("SLURMD_NODENAME", None)
    inject(runner, runner.folder, SHORT_TIMEOUTS)
    first, second = nodes.start("run.name=x", LONG)
    wait_for_step(runner, first)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    errors = first.communicate(timeout=300)[1]
    assert first.returncode == 1
    name = socket.gethostname()
    assert f"hlat: node {name} did not answer after rank 0 raised" in errors, errors[-3000:]


@pytest.mark.slow
def test_refuse_another_number_of_nodes(nodes):
    (only,) = nodes.start("run.name=x", nodes=1)
    errors = only.communicate(timeout=300)[1]
    assert only.returncode == 2
    assert "hardware.nodes=2, but the job has HLAT_NODES=1; start it on 2 nodes" in errors
