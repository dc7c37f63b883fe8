"""A run of several processes, started by one command: its numbers, its end, and how it fails."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run.conftest import Runner

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LAYOUT = ("parallelism.tp=2", "parallelism.sequence_parallel=true")
BROKEN = """
import os
if os.environ.get("RANK") == "{rank}":
    from hlat.engine.native.native_engine import NativeEngine
    {statement}
"""


def children(process: subprocess.Popen) -> list[int]:
    """Process ids of those that it started and that train."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "hlat.train"], capture_output=True, text=True
    )
    return [int(number) for number in found.stdout.split()]


def gone(numbers: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{number}").exists() for number in numbers):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def broken(runner, folder: Path, rank: int, statement: str) -> None:
    """Let a rank do something in its third step."""
    inject(runner, folder, BROKEN.format(rank=rank, statement=statement))


def inject(runner, folder: Path, code: str) -> None:
    """Let every process that the runner starts begin with some code."""
    (folder / "sitecustomize.py").write_text(code)
    runner.environment["PYTHONPATH"] += os.pathsep + str(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory, small):
    """A run of two processes that nothing happened to."""
    runner = Runner(tmp_path_factory.mktemp("two"), small)
    done = runner.run_process("run.name=two", *LAYOUT)
    assert done.returncode == 0, done.stderr
    return runner


def test_one_command_starts_them_all_and_another_layout_goes_on(runner, uninterrupted):
    four = ("parallelism.tp=2", "parallelism.pp=2", "batch.micro_batch_size=2")
    done = runner.run_process("run.name=x", "run.steps=10", *four)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("complete at step 10") == 1
    assert done.stderr.count("step 10/10") <= 1
    log = runner.folder / "runs/x/logs/rank_1.log"
    log.write_text("what rank 1 had to say")
    again = runner.run_process("run.name=x", "parallelism.dp=2", "parallelism.zero=3")
    assert again.returncode == 0, again.stderr
    kept = [path.read_text() for path in log.parent.glob("rank_1.*.log")]
    assert kept == ["what rank 1 had to say"]
    assert [row["step"] for row in runner.rows("x", "metrics.jsonl")] == [*range(1, 21)]
    for found, expected in zip(runner.losses("x"), uninterrupted.losses("whole"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, 75), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)],
)
def test_the_same_command_goes_on_to_the_last_bit(runner, two, sent, code):
    stopped = runner.run_until(7, sent, "run.name=x", *LAYOUT)
    assert stopped.returncode == code, stopped.stderr
    if code == 75:
        printed = stopped.stdout.rstrip().splitlines()[-1]
        command = shlex.split(printed.removeprefix("resume:"))
        again = subprocess.run(command, cwd=runner.folder, env=runner.environment)
    else:
        again = runner.run_process("run.name=x", *LAYOUT)
    assert again.returncode == 0
    assert runner.losses("x") == two.losses("two")


def test_the_first_exception_is_the_one_that_is_told(runner, tmp_path):
    unwell = "NativeEngine.read = lambda *_: (os.write(2, b'unwell\\n'), 1 / 0)"
    broken(runner, tmp_path, 1, unwell)
    begun = time.monotonic()
    failed = runner.run_process("run.name=x", *LAYOUT)
    assert failed.returncode == 1
    assert "[rank 1] unwell" in failed.stderr
    assert "hlat: rank 1 failed:" in failed.stderr
    assert "ZeroDivisionError" in failed.stderr
    assert failed.stderr.count("Traceback") == 1
    assert time.monotonic() - begun < 300


def test_a_mistake_that_one_rank_finds_is_told_kindly(runner, tmp_path):
    raised = "import hlat.config.config_errors as e; NativeEngine.read = lambda *_: (_ for _ in ()).throw(e.ConfigError('key=1: no'))"
    broken(runner, tmp_path, 1, raised)
    failed = runner.run_process("run.name=x", *LAYOUT)
    assert failed.returncode == 2
    assert "hlat: key=1: no" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_killed_rank_ends_all(runner):
    process = runner.start("run.name=x", *LAYOUT)
    while not runner.rows("x", "metrics.jsonl"):
        time.sleep(0.02)
    workers = children(process)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    begun = time.monotonic()
    _, err = process.communicate()
    assert process.returncode == 1
    assert "was killed by SIGKILL" in err
    assert time.monotonic() - begun < 60
    assert gone(workers)


def test_no_rank_outlives_the_command_which_is_where_the_attempt_began(runner):
    before = time.time()
    process = runner.start("run.name=x", *LAYOUT)
    after = time.time()
    while not runner.rows("x", "metrics.jsonl"):
        time.sleep(0.02)
    events = runner.rows("x", "events.jsonl")
    began = next(row["began"] for row in events if row["event"] == "start")
    assert before - 0.02 <= began <= after + 0.02
    workers = children(process)
    process.kill()
    process.communicate()
    assert gone(workers)


def test_a_world_that_does_not_fit_is_refused_before_it_starts(runner):
    refused = runner.run("parallelism.tp=3")
    assert refused.returncode == 2
    assert "parallelism.tp=3 does not divide" in refused.stderr


def test_torchruns_processes_are_used(runner, uninterrupted):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "hlat.train", *runner.small, "run.name=x", "parallelism.tp=2",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=runner.folder, env=runner.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("complete at step 20") == 1
    for found, expected in zip(runner.losses("x"), uninterrupted.losses("whole"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
