"""What a person at a terminal sees of a run of several processes: one bar, and what matters."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.run.conftest import Runner
from tests.run.test_processes import LAYOUT, broken

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]


def on_terminal(runner: Runner, *overrides: str) -> tuple[int, str]:
    """Exit code of a run, and all that it wrote to its terminal."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "hlat.train", *runner.small, *overrides]
    process = subprocess.Popen(
        command, cwd=runner.folder, env=runner.environment, stdin=its, stdout=its, stderr=its
    )
    os.close(its)
    written = bytearray()
    while True:
        try:
            told = os.read(ours, 65536)
        except OSError:  # as Linux ends a terminal that nobody holds any more
            break
        if not told:
            break
        written += told
    os.close(ours)
    return process.wait(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def lines(shown: str) -> list[str]:
    """What stands in the end: of a line that was written over, the last of it."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in shown.split("\n")]


def test_there_is_one_bar_and_a_summary(runner: Runner) -> None:
    code, shown = on_terminal(runner, "run.name=x", *LAYOUT)
    assert code == 0, shown
    steps = [int(step) for step in re.findall(r"\| (\d+)/20 \[", shown)]
    assert steps, shown
    assert steps == sorted(steps), "a second bar would count anew"
    assert steps[-1] == 20
    stand = lines(shown)
    assert sum("20/20 [" in line for line in stand) == 1
    assert not [line for line in stand if line.startswith("step 1/20")], "no lines beside the bar"
    *_, summary = shown.partition("complete at step 20")
    assert [line.partition(":")[0] for line in lines(summary)[1:5]] == [
        *("held-out bits per byte", "run directory", "report", "resume")
    ]
    assert shown.count("complete at step 20") == 1


def test_only_the_rank_that_failed_complains(runner: Runner, tmp_path: Path) -> None:
    broken(runner, tmp_path, 1, "NativeEngine.train_step = lambda self, *given: 1 / 0")
    code, shown = on_terminal(runner, "run.name=x", *LAYOUT)
    assert code != 0
    assert shown.count("ZeroDivisionError: division by zero") == 1
    assert shown.count("Traceback (most recent call last)") <= 1
