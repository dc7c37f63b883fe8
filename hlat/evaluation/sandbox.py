"""Runs a program that nobody has read, where it can hurt nobody.

A program is a Python text that runs in a process of its own: no network, no environment, nothing
to read but Python itself, nothing to write but one empty folder in memory, and limits on time,
memory, files and processes. The kernel's namespaces give that without a library or privileges
(cell.py), so a program is judged by a second one, in another cell, that only hears what the first
one tells it: see humaneval.py.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hlat.config.errors import ConfigError
from hlat.evaluation import cell

_READ_AT_ONCE, _PATIENCE_S, _PATIENCE_TO_END_S = 1 << 16, 0.05, 5.0
_SYSTEM = ("/usr", "/lib", "/lib64")
"""Where shared libraries are that Python needs."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: By the clock on the wall, after which it is killed.
        cpu_seconds: Of each process.
        memory_bytes: Addresses of each process.
        num_processes: Processes and threads at a time.
        disk_bytes: All files together.
        file_bytes: Each file.
        num_files: Files and folders that it may make.
        num_open_files: Descriptors of each process.
        output_bytes: What it may print before it is killed.
    """

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    num_processes: int = 8
    disk_bytes: int = 16 << 20
    file_bytes: int = 8 << 20
    num_files: int = 64
    num_open_files: int = 32
    output_bytes: int = 1 << 16


@dataclass(frozen=True)
class End:
    """How a program ended.

    Attributes:
        status: Its exit code; None: it was killed.
        output: What it printed, as far as it was allowed to.
        why: For what it was killed; empty if it ended by itself.
    """

    status: int | None
    output: str
    why: str = ""


def check(isolated: bool = True) -> None:
    """Find out whether this machine can keep programs in.

    Raises:
        ConfigError: It cannot; says what is missing.
    """
    if not isolated:
        return
    reason = f"a kernel of {sys.platform}"
    if sys.platform == "linux":
        end = run("print('here')")
        if (end.status, end.output) == (0, "here\n"):
            return
        reason = end.why or end.output.strip() or f"exit code {end.status}"
    raise ConfigError(
        f"generated code cannot be kept from network and files on this machine ({reason}); judge "
        "the samples on a Linux machine where users may make namespaces, or accept limits on time "
        "and memory alone with accept_weak_sandbox=true"
    )


def run(program: str, limits: Limits | None = None, isolated: bool = True) -> End:
    """Run one program alone."""
    return _run([(program, ())], limits or Limits(), isolated)


def run_against(
    judge: str, program: str, limits: Limits | None = None, isolated: bool = True
) -> End:
    """Run a judge that may ask a program, each in a cell of its own; ends when the judge does.

    Each has two descriptors for it: it reads from `sys.argv[2]` and writes to `sys.argv[3]`.

    Returns:
        How the judge ended.
    """
    questions, answers = os.pipe(), os.pipe()
    cells = [(judge, (answers[0], questions[1])), (program, (questions[0], answers[1]))]
    return _run(cells, limits or Limits(), isolated)


def _run(programs: Sequence[tuple[str, tuple[int, ...]]], limits: Limits, isolated: bool) -> End:
    with ExitStack() as stack:
        try:
            cells = [
                stack.enter_context(_started(program, ends, limits, isolated))
                for program, ends in programs
            ]
        finally:  # they alone hold their ends now, so each hears when the other is gone
            for end in (end for _, ends in programs for end in ends):
                os.close(end)
        return _attend(cells, limits)


@contextmanager
def _started(
    program: str, ends: tuple[int, ...], limits: Limits, isolated: bool
) -> Iterator["subprocess.Popen[bytes]"]:
    """A cell with a program; all its processes are killed in the end."""
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    with tempfile.TemporaryFile() as source, tempfile.TemporaryDirectory() as folder:
        source.write(program.encode())
        source.seek(0)
        order = {
            "python": python,
            "source": source.fileno(),
            "ends": ends,
            "isolated": isolated,
            "visible": _visible(),
            "folder": folder,
            "limits": asdict(limits),
        }
        process = subprocess.Popen(
            [python, "-I", "-S", "-B", str(Path(cell.__file__)), json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(source.fileno(), *ends),
            env={},
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process, isolated)


def _end(process: "subprocess.Popen[bytes]", isolated: bool) -> None:
    """Kill all processes of a cell, and return when they are gone, where that can be known."""
    if isolated:
        process.terminate()  # it ends when the last process of its namespace is gone
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_TO_END_S)
    if not isolated or process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _attend(cells: "Sequence[subprocess.Popen[bytes]]", limits: Limits) -> End:
    """Wait for the first of some cells to end, and listen to all of them meanwhile."""
    deadline = time.monotonic() + limits.seconds
    outputs = {cell: bytearray() for cell in cells}
    first = cells[0]
    with selectors.DefaultSelector() as selector:
        for each in cells:
            assert each.stdout is not None
            selector.register(each.stdout, selectors.EVENT_READ, each)
        while first.poll() is None or _ready(selector, first):
            if time.monotonic() > deadline:
                return _killed(outputs[first], f"timed out after {limits.seconds:g} s")
            for key, _ in selector.select(_PATIENCE_S):
                heard = os.read(key.fd, _READ_AT_ONCE)
                if not heard:
                    selector.unregister(key.fileobj)
                outputs[key.data] += heard
                if len(outputs[key.data]) > limits.output_bytes:
                    return _killed(
                        outputs[first][: limits.output_bytes],
                        f"it printed more than {limits.output_bytes} bytes",
                    )
    return End(first.returncode, outputs[first].decode(errors="replace"))


def _ready(selector: selectors.BaseSelector, process: "subprocess.Popen[bytes]") -> bool:
    """Whether something of a process that has ended is still to be read."""
    return any(key.data is process for key, _ in selector.select(0))


def _killed(output: bytearray, why: str) -> End:
    return End(None, output.decode(errors="replace"), why)


def _visible() -> list[str]:
    """What a Python program reads that imports nothing but Python's own library."""
    software = [os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    return [path for path in dict.fromkeys((*_SYSTEM, *software)) if os.path.lexists(path)]
