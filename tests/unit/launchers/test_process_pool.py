"""Points start in order as there is room, one line each tells how they end, signals reach them once.

What they run here are programs of a few lines instead of hlat.train.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from omegaconf import DictConfig

from hlat.config import compose as composition
from hlat.config.config_errors import ExitCode
from hlat.config.resolve import resolve_config

composition.register_configs()
from hydra_plugins.hlat_launchers._sweep_points import SweepPoint  # noqa: E402
from hydra_plugins.hlat_launchers.local._core_budget import (  # noqa: E402 (registered above)
    LocalDevices,
    ResourceBudget,
    ResourceRequest,
)
from hydra_plugins.hlat_launchers.local._process_pool import ProcessPool  # noqa: E402
from hydra_plugins.hlat_launchers.local._sweep_console import SweepConsole, SweepTask  # noqa: E402


def read_console(capfd: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, with N instead of the seconds that a program took."""
    return re.sub(r"after \d+ s", "after N s", capfd.readouterr().out)


NONE = LocalDevices("cpu", ())
ONE_CORE = ResourceRequest(num_processes=1, threads_per_process=1, memory_bytes=0, num_devices=0)
SAY = "import os, sys; print(sys.argv[1], os.environ.get('OMP_NUM_THREADS'))"
MEET = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
deadline = time.monotonic() + 20
while not (pathlib.Path("a").exists() and pathlib.Path("b").exists()):
    if time.monotonic() > deadline:
        sys.exit("the other does not run")
"""
NEVER_TOGETHER = """
import os, sys, time
os.mkdir("busy")
time.sleep(0.2)
os.rmdir("busy")
print(sys.argv[1])
"""
COUNT = """
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
        composed = compose(f"run.name={word}", "run.steps=7")
        point = SweepPoint([word], composed, resolve_config(composed), DictConfig({}))
        return SweepTask(number, point, Path(f"{number}.log") if log else None)

    return make


def queue(script: str, budget: ResourceBudget) -> ProcessPool:
    return ProcessPool([sys.executable, "-S", "-c", script], {}, budget, SweepConsole())


def together(jobs: int, cores: int = 8, devices: LocalDevices = NONE) -> ResourceBudget:
    return ResourceBudget(jobs, cores, 2.0**40, devices)


def test_two_run_at_once_where_there_is_room(task):
    tasks = [(task(0, "a"), ONE_CORE), (task(1, "b"), ONE_CORE)]
    assert queue(MEET, together(2)).run(tasks) == {0: 0, 1: 0}


@pytest.mark.parametrize("budget", [together(1), together(3, cores=1)], ids=["jobs", "cores"])
def test_the_next_waits_where_there_is_none(task, budget):
    tasks = [(task(i, word), ONE_CORE) for i, word in enumerate("abc")]
    assert queue(NEVER_TOGETHER, budget).run(tasks) == {0: 0, 1: 0, 2: 0}


def test_each_has_a_file_and_the_console_a_line_for_start_and_end(task, capfd):
    tasks = [(task(3, "a"), ONE_CORE), (task(4, "b"), ONE_CORE)]
    queue(SAY, together(2)).run(tasks)
    assert Path("3.log").read_text() == "a 1\n"
    assert Path("4.log").read_text() == "b 1\n"
    lines = read_console(capfd).splitlines()
    assert lines[:2] == ["[3] a  (output: 3.log)", "[4] b  (output: 4.log)"]
    assert sorted(lines[2:]) == ["[3] finished after N s", "[4] finished after N s"]


def test_alone_a_point_has_the_console_and_nothing_is_set(task, capfd):
    assert queue(SAY, ResourceBudget()).run([(task(0, "a", log=False), ResourceRequest())]) == {
        0: 0
    }
    assert capfd.readouterr().out == "[0] a\na None\n"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (0, "finished after N s, step 7/7, loss 3.2500"),
        (3, "diverged, exit code 3, after N s, step 7/7, loss 3.2500; see 0.log"),
        (1, "failed, exit code 1, after N s, step 7/7, loss 3.2500; see 0.log"),
    ],
)
def test_the_end_is_told_with_the_last_loss(task, capfd, code, told):
    write_metrics("a", {"step": 7, "loss": 3.25})
    queue(f"raise SystemExit({code})", together(2)).run([(task(0, "a"), ONE_CORE)])
    assert f"[0] {told}\n" in read_console(capfd)


def test_a_loss_that_is_not_finite_and_half_a_row_are_told_as_they_are(task, capfd):
    write_metrics("a", {"step": 6, "loss": None}, half='{"step": 7, "lo')
    queue("pass", together(2)).run([(task(0, "a"), ONE_CORE)])
    assert "step 6/7, loss not finite" in capfd.readouterr().out


@pytest.mark.parametrize("text", ["", "half", "damaged\n"])
def test_a_journal_without_a_whole_row_is_no_obstacle(task, capfd, text):
    write_metrics("a", half=text)
    queue("pass", together(2)).run([(task(0, "a"), ONE_CORE)])
    assert "[0] finished after N s\n" in read_console(capfd)


def test_those_that_run_are_told_to_save_if_the_next_cannot_start(task):
    script = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("saved").touch(), sys.exit(75)))
pathlib.Path(sys.argv[1]).touch()
time.sleep(20)
"""
    Path("1.log").mkdir()

    class WhenReady(SweepConsole):
        def print_start(self, task: SweepTask) -> None:
            wait_for(lambda: task.number == 0 or Path("a").exists())

    running = ProcessPool([sys.executable, "-S", "-c", script], {}, together(2), WhenReady())
    with pytest.raises(IsADirectoryError):
        running.run([(task(0, "a"), ONE_CORE), (task(1, "b"), ONE_CORE)])
    assert Path("saved").exists()


def test_a_terminal_is_told_how_far_all_are(task, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    write_metrics("a", {"step": 2, "loss": 4.0})
    console = SweepConsole()
    clock = time.monotonic() + 5
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    for _ in range(2):
        console.print_progress([task(0, "a"), task(1, "b")], 3)
    assert capsys.readouterr().out == "\r\x1b[K[0] step 2/7 loss 4.0000  [1] starting  3 waiting"


def test_devices_are_given_out_once(task):
    script = "import os, sys, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.4)"
    need = ResourceRequest(num_processes=2, threads_per_process=1, memory_bytes=0, num_devices=2)
    tasks = [(task(i, word), need) for i, word in enumerate("abc")]
    five = LocalDevices("cuda", ("1", "3", "4", "6", "7"))
    queue(script, together(3, devices=five)).run(tasks)
    told = [Path(f"{i}.log").read_text().strip() for i in range(3)]
    assert told[:2] == ["1,3", "4,6"]
    assert told[2] in ("1,3", "4,6")


def test_a_point_that_fails_stops_nothing(task):
    script = "import sys; sys.exit(3 if sys.argv[1] == 'a' else 0)"
    tasks = [(task(i, word), ONE_CORE) for i, word in enumerate("abc")]
    assert queue(script, together(1)).run(tasks) == {0: 3, 1: 0, 2: 0}


def test_after_a_point_that_was_interrupted_none_starts(task):
    tasks = [(task(i, word), ONE_CORE) for i, word in enumerate("abc")]
    assert queue("raise SystemExit(75)", together(1)).run(tasks) == {0: ExitCode.PREEMPTED}


def test_a_signal_reaches_all_that_run_once_and_no_other_starts(task):
    tasks = [(task(i, word), ONE_CORE) for i, word in enumerate("abc")]
    before = signal.getsignal(signal.SIGUSR2)
    send_when(lambda: Path("a").exists() and Path("b").exists(), signal.SIGUSR2)
    assert queue(COUNT, together(2)).run(tasks) == {0: 75, 1: 75}
    assert [Path(f"{i}.log").read_text() for i in range(2)] == ["heard 1\n"] * 2
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_point_that_is_ended_before_it_hears_signals_was_interrupted_too(task):
    script = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(20)"
    send_when(lambda: Path("a").exists(), signal.SIGTERM)
    tasks = [(task(0, "a"), ONE_CORE), (task(1, "b"), ONE_CORE)]
    assert queue(script, together(1)).run(tasks) == {0: ExitCode.PREEMPTED}


def write_metrics(name: str, *rows: dict, half: str = "") -> None:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + half)


def send_when(ready, number: signal.Signals) -> None:
    """Send this process a signal as soon as something is so."""

    def wait() -> None:
        wait_for(ready)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


def wait_for(ready) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)
