"""Output of a run on a terminal: one progress bar, a summary, and one error."""

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

pytestmark = pytest.mark.distributed

SEVERAL_PROCESSES = [pytest.mark.slow, pytest.mark.xdist_group("processes")]
LAYOUT = ("parallelism.tp=2", "parallelism.sequence_parallel=true")
FAIL_IN_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    from hlat.engine.native.native_engine import NativeEngine
    NativeEngine.train_step = lambda self, *args: 1 / 0
"""


def on_terminal(runner: Runner, *overrides: str) -> tuple[int, str]:
    """Return the exit code of a run and its output on the terminal."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "hlat.train", *runner.small, *overrides]
    process = subprocess.Popen(
        command,
        cwd=runner.folder,
        env=runner.environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    written = bytearray()
    while True:
        try:
            content = os.read(reader, 65536)
        except OSError:  # Linux raises it after the last writer has closed the terminal
            break
        if not content:
            break
        written += content
    os.close(reader)
    return process.wait(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def visible_lines(shown: str) -> list[str]:
    """Return the lines that are visible at the end, without overwritten text."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in shown.split("\n")]


@pytest.mark.parametrize("layout", [(), pytest.param(LAYOUT, marks=SEVERAL_PROCESSES)])
@pytest.mark.slow
def test_show_one_progress_bar_and_a_summary(runner: Runner, layout: tuple[str, ...]) -> None:
    code, shown = on_terminal(runner, "run.name=x", *layout)
    assert code == 0, shown
    steps = [int(step) for step in re.findall(r"\| (\d+)/20 \[", shown)]
    assert steps, shown
    assert steps == sorted(steps), "a second bar starts at 0"
    assert steps[-1] == 20
    visible = visible_lines(shown)
    assert sum("20/20 [" in line for line in visible) == 1
    assert not [line for line in visible if line.startswith("step 1/20")], "lines and a bar"
    *_, summary = shown.partition("complete at step 20")
    assert [line.partition(":")[0] for line in visible_lines(summary)[1:5]] == [
        *("held-out bits per byte", "run directory", "report", "extend")
    ]
    assert shown.count("complete at step 20") == 1


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_print_the_error_of_the_failed_rank_only(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAIL_IN_RANK_1)
    runner.environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    code, shown = on_terminal(runner, "run.name=x", *LAYOUT)
    assert code != 0
    assert shown.count("ZeroDivisionError: division by zero") == 1
    assert shown.count("Traceback (most recent call last)") <= 1
