"""Points start in order within the budget, report their end in one line, and get each signal once.

The points are short scripts instead of hlat.train.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from hlat.config import compose as composition
from hlat.config.config_errors import ExitCode
from hlat.config.resolve import resolve_config

composition.register_configs()
from hydra_plugins.hlat_launchers._point_composer import PointComposer  # noqa: E402
from hydra_plugins.hlat_launchers._sweep_points import SweepPoint  # noqa: E402
from hydra_plugins.hlat_launchers.local import _sweep_time_left  # noqa: E402
from hydra_plugins.hlat_launchers.local._core_budget import (  # noqa: E402 (registered above)
    LocalDevices,
    ResourceBudget,
    ResourceRequest,
)
from hydra_plugins.hlat_launchers.local._process_pool import ProcessPool  # noqa: E402
from hydra_plugins.hlat_launchers.local._sweep_console import SweepConsole, SweepTask  # noqa: E402
from hydra_plugins.hlat_launchers.local._sweep_time_left import SweepTimeLeft  # noqa: E402


def read_console(capfd: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, with N instead of the seconds that a program took."""
    return re.sub(r"after \d+ s", "after N s", capfd.readouterr().out)


NONE = LocalDevices("cpu", ())
ONE_CORE = ResourceRequest(num_processes=1, threads_per_process=1, memory_bytes=0, num_devices=0)
PRINT_ARGUMENT = "import os, sys; print(sys.argv[1], os.environ.get('OMP_NUM_THREADS'))"
WAIT_FOR_OTHER = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
deadline = time.monotonic() + 20
while not (pathlib.Path("a").exists() and pathlib.Path("b").exists()):
    if time.monotonic() > deadline:
        sys.exit("the other does not run")
"""
FAIL_IF_CONCURRENT = """
import os, sys, time
os.mkdir("busy")
time.sleep(0.2)
os.rmdir("busy")
print(sys.argv[1])
"""
COUNT_SIGNALS = """
import pathlib, signal, sys, time
count = 0
def note(number, frame):
    global count
    count += 1
signal.signal(signal.SIGUSR2, note)
pathlib.Path(sys.argv[1]).touch()
deadline = time.monotonic() + 20
while not count and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.5)
print("heard", count)
sys.exit(75)
"""


@pytest.fixture
def task(compose, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def make(number: int, word: str, log: bool = True) -> SweepTask:
        config = resolve_config(compose(f"run.name={word}", "run.steps=7"))
        point = SweepPoint([word], config, b"", Mock(PointComposer))
        return SweepTask(number, point, Path(f"{number}.log") if log else None)

    return make


def run_pool(
    script: str, budget: ResourceBudget, work: list, num_points: int = 0
) -> dict[int, int]:
    console = SweepConsole([task for task, _ in work], num_points or len(work))
    return ProcessPool([sys.executable, "-S", "-c", script], {}, budget, console).run(work)


def build_budget(jobs: int, cores: int = 8, devices: LocalDevices = NONE) -> ResourceBudget:
    return ResourceBudget(jobs, cores, 2.0**40, devices)


def test_points_run_concurrently_within_the_budget(task):
    tasks = [(task(0, "a"), ONE_CORE), (task(1, "b"), ONE_CORE)]
    assert run_pool(WAIT_FOR_OTHER, build_budget(2), tasks) == {0: 0, 1: 0}


@pytest.mark.parametrize(
    "budget", [build_budget(1), build_budget(3, cores=1)], ids=["jobs", "cores"]
)
def test_a_point_waits_until_it_fits_the_budget(task, budget):
    tasks = [(task(i, word), ONE_CORE) for i, word in enumerate("abc")]
    assert run_pool(FAIL_IF_CONCURRENT, budget, tasks) == {0: 0, 1: 0, 2: 0}


def test_each_point_has_a_log_file_and_two_lines_on_the_console(task, capfd):
    tasks = [(task(3, "a"), ONE_CORE), (task(4, "b"), ONE_CORE)]
    run_pool(PRINT_ARGUMENT, build_budget(2), tasks, num_points=5)
    assert Path("3.log").read_text() == "a 1\n"
    assert Path("4.log").read_text() == "b 1\n"
    lines = read_console(capfd).splitlines()
    assert lines[:2] == ["[4 of 5] a  (output: 3.log)", "[5 of 5] b  (output: 4.log)"]
    assert sorted(lines[2:]) == ["[4 of 5] finished after N s", "[5 of 5] finished after N s"]


def test_a_point_without_a_log_writes_to_the_console(task, capfd):
    work = [(task(0, "a", log=False), ResourceRequest())]
    assert run_pool(PRINT_ARGUMENT, ResourceBudget(), work) == {0: 0}
    assert capfd.readouterr().out == "[1 of 1] a\na None\n"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (0, "finished after N s, step 7/7, loss 3.2500"),
        (3, "diverged, exit code 3, after N s, step 7/7, loss 3.2500; see 0.log"),
        (1, "failed, exit code 1, after N s, step 7/7, loss 3.2500; see 0.log"),
    ],
)
def test_the_end_is_printed_with_the_last_loss(task, capfd, code, output):
    write_metrics("a", {"step": 7, "loss": 3.25})
    run_pool(f"raise SystemExit({code})", build_budget(2), [(task(0, "a"), ONE_CORE)])
    assert f"[1 of 1] {output}\n" in read_console(capfd)


def test_non_finite_loss_and_partial_row(task, capfd):
    write_metrics("a", {"step": 6, "loss": None}, half='{"step": 7, "lo')
    run_pool("pass", build_budget(2), [(task(0, "a"), ONE_CORE)])
    assert "step 6/7, loss not finite" in capfd.readouterr().out


@pytest.mark.parametrize("text", ["", "half", "damaged\n"])
def test_metrics_without_a_complete_row_are_ignored(task, capfd, text):
    write_metrics("a", half=text)
    run_pool("pass", build_budget(2), [(task(0, "a"), ONE_CORE)])
    assert "[1 of 1] finished after N s\n" in read_console(capfd)


def test_running_points_get_sigterm_if_the_next_cannot_start(task):
    script = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("saved").touch(), sys.exit(75)))
pathlib.Path(sys.argv[1]).touch()
time.sleep(20)
"""
    Path("1.log").mkdir()

    class WhenReady(SweepConsole):
        def __init__(self) -> None:
            pass

        def print_start(self, task: SweepTask) -> None:
            wait_for(lambda: task.number == 0 or Path("a").exists())

    running = ProcessPool([sys.executable, "-S", "-c", script], {}, build_budget(2), WhenReady())
    with pytest.raises(IsADirectoryError):
        running.run([(task(0, "a"), ONE_CORE), (task(1, "b"), ONE_CORE)])
    assert Path("saved").exists()


def test_progress_is_printed_on_a_terminal(task, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    write_metrics("a", {"step": 2, "loss": 4.0})
    running = [task(0, "a"), task(1, "b")]
    console = SweepConsole(running, 5)
    clock = time.monotonic() + 5
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    for _ in range(2):
        console.print_progress(running, 3)
    line = "[1 of 5] step 2/7 loss 4.0000  [2 of 5] starting  3 waiting"
    assert capsys.readouterr().out == f"\r\x1b[K{line}"


def test_the_end_of_a_failed_point_shows_the_end_of_its_log(task, capfd):
    script = "raise SystemExit('one\\ntwo\\nthree\\n\\nfour')"
    run_pool(script, build_budget(1), [(task(0, "a"), ONE_CORE)])
    assert capfd.readouterr().out.splitlines()[2:] == ["    two", "    three", "    four"]


def test_time_left_of_a_sweep_counts_running_and_waiting_points(task):
    """Train 2 of 3 points of 7 steps: 10 s to the first step, then 2 s per step."""
    points = [task(i, word).point for i, word in enumerate("abc")]
    time_left = SweepTimeLeft(points)
    time_left.start_point(points[0], 0, 100.0)
    assert time_left.estimate() is None
    for step in range(1, 5):
        time_left.update(points[0], step, 108.0 + 2 * step)
    assert time_left.estimate() is None, "less than five steps"
    time_left.update(points[0], 5, 118.0)
    assert time_left.estimate() == pytest.approx(2 * 2 + 2 * (10 + 7 * 2))
    time_left.update(points[0], 7, 122.0)
    time_left.end_point(points[0])
    time_left.start_point(points[1], 6, 130.0)
    assert time_left.estimate() == pytest.approx(2 + 10 + 7 * 2)
    time_left.end_point(points[2])
    assert time_left.estimate() == pytest.approx(2)


def test_time_left_reads_no_waiting_points(task, monkeypatch):
    """The status line of a sweep of many points has the cost of the running ones."""
    first, *others = [task(i, f"p{i}").point for i in range(20)]
    time_left = SweepTimeLeft([first, *others])
    time_left.start_point(first, 0, 0.0)
    for step in range(1, 7):
        time_left.update(first, step, 2.0 * step)
    read = []
    compute = _sweep_time_left.compute_total_steps
    count = lambda config: read.append(config) or compute(config)  # noqa: E731
    monkeypatch.setattr(_sweep_time_left, "compute_total_steps", count)
    monkeypatch.setattr(SweepPoint, "run_dir", property(lambda point: read.append(point)))
    assert time_left.estimate() == pytest.approx(2 + 19 * (2 + 7 * 2))
    assert not read


def test_time_left_is_at_least_that_of_the_longest_point(task):
    points = [task(i, word).point for i, word in enumerate("abc")]
    steps = {point.run_dir: 7 for point in points} | {points[2].run_dir: 70}
    for i, point in enumerate(points):
        run = replace(point.config.run, steps=steps[point.run_dir])
        points[i] = replace(point, config=replace(point.config, run=run))
    time_left = SweepTimeLeft(points)
    for point in points[:2]:
        time_left.start_point(point, 0, 0.0)
        time_left.update(point, 1, 1.0)
        time_left.update(point, 6, 6.0)
    assert time_left.estimate() == pytest.approx(1 + 70)
    time_left.end_point(points[2])
    assert time_left.estimate() == pytest.approx(1)


@pytest.mark.slow
def test_each_device_is_assigned_once(task):
    script = "import os, sys, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.4)"
    need = ResourceRequest(num_processes=2, threads_per_process=1, memory_bytes=0, num_devices=2)
    tasks = [(task(i, word), need) for i, word in enumerate("abc")]
    five = LocalDevices("cuda", ("1", "3", "4", "6", "7"))
    run_pool(script, build_budget(3, devices=five), tasks)
    output = [Path(f"{i}.log").read_text().strip() for i in range(3)]
    assert output[:2] == ["1,3", "4,6"]
    assert output[2] in ("1,3", "4,6")


def test_a_failed_point_stops_no_other(task):
    script = "import sys; sys.exit(3 if sys.argv[1] == 'a' else 0)"
    tasks = [(task(i, word), ONE_CORE) for i, word in enumerate("abc")]
    assert run_pool(script, build_budget(1), tasks) == {0: 3, 1: 0, 2: 0}


def test_no_point_starts_after_an_interrupted_one(task):
    tasks = [(task(i, word), ONE_CORE) for i, word in enumerate("abc")]
    assert run_pool("raise SystemExit(75)", build_budget(1), tasks) == {0: ExitCode.PREEMPTED}


@pytest.mark.slow
def test_a_signal_is_forwarded_once_and_no_point_starts(task):
    tasks = [(task(i, word), ONE_CORE) for i, word in enumerate("abc")]
    before = signal.getsignal(signal.SIGUSR2)
    send_when(lambda: Path("a").exists() and Path("b").exists(), signal.SIGUSR2)
    assert run_pool(COUNT_SIGNALS, build_budget(2), tasks) == {0: 75, 1: 75}
    assert [Path(f"{i}.log").read_text() for i in range(2)] == ["heard 1\n"] * 2
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_request_for_stacks_is_forwarded_and_the_next_point_starts(task):
    script = """
import pathlib, signal, sys, time
signal.signal(signal.SIGQUIT, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1]).touch()
time.sleep(20 * (sys.argv[1] == "a"))
"""
    send_when(lambda: Path("a").exists(), signal.SIGQUIT)
    tasks = [(task(0, "a"), ONE_CORE), (task(1, "b"), ONE_CORE)]
    assert run_pool(script, build_budget(1), tasks) == {0: 0, 1: 0}


def test_a_point_terminated_before_it_handles_signals_is_interrupted(task):
    script = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(20)"
    send_when(lambda: Path("a").exists(), signal.SIGTERM)
    tasks = [(task(0, "a"), ONE_CORE), (task(1, "b"), ONE_CORE)]
    assert run_pool(script, build_budget(1), tasks) == {0: ExitCode.PREEMPTED}


def write_metrics(name: str, *rows: dict, half: str = "") -> None:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + half)


def send_when(ready, number: signal.Signals) -> None:
    """Send this process a signal as soon as `ready` returns True."""

    def wait() -> None:
        wait_for(ready)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


def wait_for(ready) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)
