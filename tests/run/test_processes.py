"""A run of several processes, started by one command: results, end and failures."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run.conftest import REPOSITORY, Runner

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LAYOUT = ("parallelism.tp=2", "parallelism.sequence_parallel=true")
BROKEN = """
import os
if os.environ.get("RANK") == "{rank}":
    from hlat.engine.native.native_engine import NativeEngine
    {statement}
"""
WAIT_IN_STEP_7 = """
import os, time
if "RANK" in os.environ:
    from hlat.engine.native.native_engine import NativeEngine
    from hlat.recovery.signal_handler import SignalHandler
    enter, train_step, handlers, steps = SignalHandler.__enter__, NativeEngine.train_step, [], []
    def record(self):
        handlers.append(self)
        return enter(self)
    def wait_for_signal(self, *arguments):
        steps.append(1)
        while len(steps) == 7 and handlers[-1].signal_name is None:
            time.sleep(0.05)
        return train_step(self, *arguments)
    SignalHandler.__enter__, NativeEngine.train_step = record, wait_for_signal
"""
HANG_IN_START = """
import os, time
from hlat.recovery import start_notice
start_notice._FIRST_NOTICE_S = 4
if os.environ.get("RANK") == "1":
    from hlat.distributed import process_groups
    process_groups._create_group = lambda *_: time.sleep(120)
"""
SKIP_FIGURES = (REPOSITORY / "tests/fakes/skip_figures.py").read_text()
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::ffff:127.0.0.1, as /proc/net/tcp and tcp6 show them."""


def children(process: subprocess.Popen) -> list[int]:
    """Return the ids of the worker processes that a process has started."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "hlat.train"], capture_output=True, text=True
    )
    return [int(number) for number in found.stdout.split()]


def wait_until_ended(processes: list[int]) -> None:
    """Wait until none of the processes exists."""
    deadline = time.monotonic() + 120
    while running := [number for number in processes if Path(f"/proc/{number}").exists()]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def wait_for_step(runner: Runner, process: subprocess.Popen, step: int = 1) -> None:
    """Wait until a process has logged a step of run x."""
    while not any(row["step"] >= step for row in runner.rows("x", "metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def broken(runner: Runner, folder: Path, rank: int, statement: str) -> None:
    """Execute a statement when a rank starts."""
    inject(runner, folder, BROKEN.format(rank=rank, statement=statement))


def inject(runner: Runner, folder: Path, code: str) -> None:
    """Run code at the start of all processes of the runner, and disable figures of reports."""
    (folder / "sitecustomize.py").write_text(f"{SKIP_FIGURES}\n{code}")
    runner.environment["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{folder}"


@pytest.fixture(autouse=True)
def skip_figures(runner: Runner) -> None:
    """Render figures of reports as empty files."""
    inject(runner, runner.folder, "")


def find_listening_addresses(process: int) -> set[str]:
    """Return the addresses on which a process accepts connections, in hexadecimal."""
    links = [
        os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()
    ]
    sockets = {link.removeprefix("socket:[")[:-1] for link in links if link.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            arguments = line.split()
            if arguments[3] == "0A" and arguments[9] in sockets:
                found.add(arguments[1].partition(":")[0])
    return found


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory, small):
    """Start run `whole` with torchrun; return its runner and the output."""
    runner = Runner(tmp_path_factory.mktemp("torchrun"), small)
    inject(runner, runner.folder, "")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "hlat.train", *small, "run.name=whole", *LAYOUT,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=runner.folder, env=runner.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return runner, done.stdout


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, small):
    """Interrupt run x with Ctrl-C in step 7; return its runner and the process."""
    runner = Runner(tmp_path_factory.mktemp("interrupted"), small)
    inject(runner, runner.folder, WAIT_IN_STEP_7)
    return runner, runner.run_until(6, signal.SIGINT, "run.name=x", *LAYOUT)


def assert_close(found, expected):
    """Compare losses with those of another layout."""
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@pytest.mark.slow  # the default is to start the processes itself
def test_train_in_processes_of_torchrun(torchrun, uninterrupted):
    runner, printed = torchrun
    assert printed.count("complete at step 20") == 1
    assert_close(runner.losses("whole"), uninterrupted.losses("whole"))


@pytest.mark.slow  # test_resume.py resumes one process with the printed command
def test_resume_interrupted_run_bitwise_with_the_printed_command(runner, interrupted, torchrun):
    first, stopped = interrupted
    assert stopped.returncode == 75, stopped.stderr
    shutil.copytree(first.folder / "runs", runner.folder / "runs")
    command = shlex.split(stopped.stdout.rstrip().splitlines()[-1].removeprefix("resume:"))
    again = subprocess.run(command, cwd=runner.folder, env=runner.environment)
    assert again.returncode == 0
    assert runner.losses("x") == torchrun[0].losses("whole")


@pytest.mark.slow  # tests/distributed/test_reshard.py resumes in all layouts
def test_resume_with_another_layout_and_keep_earlier_logs(runner, interrupted, uninterrupted):
    shutil.copytree(interrupted[0].folder / "runs", runner.folder / "runs")
    log = runner.folder / "runs/x/logs/node_0.log"
    log.write_text("output of rank 1")
    again = runner.run_process("run.name=x", "parallelism.dp=2", "parallelism.zero=3")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("complete at step 20") == 1
    kept = [path.read_text() for path in log.parent.glob("node_0.*.log")]
    assert kept == ["output of rank 1"]
    assert [row["step"] for row in runner.rows("x", "metrics.jsonl")] == [*range(1, 21)]
    assert_close(runner.losses("x"), uninterrupted.losses("whole"))


@pytest.mark.slow  # two processes resume in another layout above
def test_resume_four_processes_as_two(runner, uninterrupted):
    four = ("parallelism.tp=2", "parallelism.pp=2", "batch.micro_batch_size=2")
    done = runner.run_process("run.name=x", "run.steps=10", *four)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("complete at step 10") == 1
    assert done.stderr.count("step 10/10") <= 1
    again = runner.run_process("run.name=x", "parallelism.dp=2", "parallelism.zero=3")
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in runner.rows("x", "metrics.jsonl")] == [*range(1, 21)]
    assert_close(runner.losses("x"), uninterrupted.losses("whole"))


@pytest.mark.slow  # an interrupted run resumes above
def test_resume_killed_run_bitwise(runner, torchrun):
    inject(runner, runner.folder, WAIT_IN_STEP_7)
    stopped = runner.run_until(6, signal.SIGKILL, "run.name=x", *LAYOUT)
    assert stopped.returncode == -9, stopped.stderr
    inject(runner, runner.folder, "")
    assert runner.run_process("run.name=x", *LAYOUT).returncode == 0
    assert runner.losses("x") == torchrun[0].losses("whole")


@pytest.mark.slow  # test_faults.py: the same of one process
def test_report_only_the_first_exception(runner, tmp_path):
    broken(
        runner,
        tmp_path,
        1,
        "NativeEngine.read_metrics = lambda *_: (os.write(2, b'unwell\\n'), 1 / 0)",
    )
    failed = runner.run_process("run.name=x", *LAYOUT)
    assert failed.returncode == 1
    assert "[rank 1] unwell" in failed.stderr
    assert "hlat: rank 1 failed:" in failed.stderr
    assert "ZeroDivisionError" in failed.stderr
    assert failed.stderr.count("Traceback") == 1


@pytest.mark.slow  # test_faults.py: the same of one process
def test_report_configuration_error_of_one_rank(runner, tmp_path):
    raised = "import hlat.config.config_errors as e; NativeEngine.read_metrics = lambda *_: (_ for _ in ()).throw(e.ConfigError('key=1: no'))"
    broken(runner, tmp_path, 1, raised)
    failed = runner.run_process("run.name=x", *LAYOUT)
    assert failed.returncode == 2
    assert "hlat: key=1: no" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.slow  # test_faults.py kills one process
def test_end_all_ranks_after_one_is_killed(runner):
    process = runner.start("run.name=x", "schedule.total_steps=100000", *LAYOUT)
    wait_for_step(runner, process)
    workers = children(process)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "was killed by SIGKILL" in err
    wait_until_ended(workers)


@pytest.mark.slow  # starts and kills four processes
def test_listen_on_loopback_and_end_workers_with_the_command(runner):
    before = time.time()
    process = runner.start("run.name=x", "schedule.total_steps=100000", "parallelism.dp=2")
    after = time.time()
    wait_for_step(runner, process)
    events = runner.rows("x", "events.jsonl")
    start = next(row["began"] for row in events if row["event"] == "start")
    assert before - 0.02 <= start <= after + 0.02  # start of the command, in ticks of the kernel
    workers = children(process)
    assert len(workers) == 2
    found = {number: find_listening_addresses(number) for number in (process.pid, *workers)}
    assert found[process.pid] == {"0100007F"}
    assert set().union(*found.values()) <= LOOPBACK
    process.kill()
    process.communicate()
    wait_until_ended(workers)


@pytest.mark.slow
def test_refuse_layout_that_does_not_divide_the_model(runner):
    refused = runner.run("parallelism.tp=3")
    assert refused.returncode == 2
    assert "parallelism.tp=3 does not divide" in refused.stderr


@pytest.mark.slow
def test_a_start_that_hangs_names_the_call_of_each_rank(runner: Runner, tmp_path: Path) -> None:
    inject(runner, tmp_path, HANG_IN_START)
    process = runner.start("run.name=x", *LAYOUT)
    assert process.stderr is not None
    calls = "rank 0: _wait_for_members (hlat/distributed/", "rank 1: create_axes (hlat/distributed/"
    # Earlier notices may show imports
    notice = next(line for line in process.stderr if all(call in line for call in calls))
    assert "the start is not complete after" in notice
    assert "rank 1:\n" in (runner.folder / "runs/x/logs/node_0.stacks").read_text()
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode != 0
