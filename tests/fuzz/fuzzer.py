"""Runs a target on mutated files in a child process, with limits on time and memory."""

import contextlib
import faulthandler
import json
import mmap
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hlat.config.config_errors import ConfigError
from tests.fuzz.mutations import Mutate

TIMEOUT_S = 10.0
"""Time within which a reader must return or raise."""
SETUP_TIMEOUT_S = 120.0
MEMORY_BYTES = 1 << 30
"""Resident memory of a reader beyond that of the imported libraries."""
_ADDRESS_SPACE_BYTES = 8 << 30
"""Limit of the address space, of which allocators of libraries reserve gigabytes."""
_POLL_S = 0.1
_MAX_CRASHES = 3
"""Killed or crashed processes after which a target ends."""
_MAX_CONTENT_BYTES = 1 << 22
_BATCH_SIZE = 500
_HLAT = f"{Path(__file__).resolve().parents[2]}{os.sep}"


@dataclass(frozen=True)
class Target:
    """Reader of foreign bytes.

    Attributes:
        name: Name, also of the directory of its regression files.
        set_up: Writes the files that the reader needs besides the fuzzed one to a directory, and
            returns valid contents of the fuzzed one.
        read: Writes the content to the directory and reads it.
        mutate: Mutation of a valid content.
        mentions: Regular expression of what an error message names: the file or the key.
        errors: Documented errors.
        weight: Share of the time, above 1 for slow readers.
    """

    name: str
    set_up: Callable[[Path], list[bytes]]
    read: Callable[[Path, bytes], object]
    mutate: Mutate
    mentions: str
    errors: tuple[type[Exception], ...] = (ConfigError,)
    weight: float = 1.0

    def check(self, directory: Path, content: bytes) -> None:
        """Raise an exception unless reading gives a value or a documented error."""
        try:
            self.read(directory, content)
        except self.errors as error:
            message = str(error)
            if not re.search(self.mentions, message):
                raise AssertionError(f"no {self.mentions} in the message: {message}") from error


@dataclass
class Finding:
    """Content for which a target has failed, the smallest one for this kind of failure."""

    kind: str
    message: str
    content: bytes

    def save(self, directory: Path) -> None:
        """Write the content and a description."""
        directory.mkdir(parents=True, exist_ok=True)
        name = "".join(char if char.isalnum() else "_" for char in self.kind)[:80]
        (directory / name).write_bytes(self.content)


@dataclass
class TargetResult:
    """Number of executions and findings of a target."""

    name: str
    executions: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON representation, without contents."""
        kinds = [{"kind": one.kind, "message": one.message} for one in self.findings]
        return {
            "target": self.name,
            "executions": self.executions,
            "seconds": round(self.seconds, 1),
            "findings": kinds,
        }


class _OutOfTimeError(KeyboardInterrupt):
    """The time of a target is over; Hypothesis does not catch this class."""


class _Child:
    """Child process; the number of executions and the last content outlive it."""

    def __init__(self, directory: Path) -> None:
        self._inputs, self._log = directory / "inputs", directory / "findings.jsonl"
        self._memory = mmap.mmap(-1, _MAX_CONTENT_BYTES + 16)
        self._sizes: dict[str, int] = {}

    @property
    def executions(self) -> int:
        """Return the number of contents that were read."""
        return int.from_bytes(self._memory[:8], "little")

    @property
    def content(self) -> bytes:
        """Return the content that was read last."""
        size = int.from_bytes(self._memory[8:16], "little")
        return self._memory[16 : 16 + size]

    def load_findings(self) -> list[Finding]:
        """Return the findings of the child process; the smallest content of a kind is last."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        rows = map(json.loads, lines)
        return [Finding(kind, message, bytes.fromhex(content)) for kind, message, content in rows]

    def run(self, run: Callable[["_Child"], None]) -> None:
        """Call a function with a memory limit, in a separate process group."""
        os.setpgid(0, 0)
        self._inputs.mkdir()
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        faulthandler.disable()  # the parent process reports crashes
        run(self)
        os._exit(0)  # threads of targets may be running

    def fuzz(self, target: Target, seconds: float) -> None:
        """Read mutations of the seeds for a time after the set-up."""
        seeds = target.set_up(self._inputs)
        _limit_memory()
        deadline = time.monotonic() + seconds
        minimized: set[str] = set()

        def read(content: bytes) -> None:
            if self.executions and time.monotonic() > deadline:
                raise _OutOfTimeError
            kind = self.read(target.check, content)
            if kind is not None and kind not in minimized:
                raise AssertionError(kind)

        test = settings(
            max_examples=_BATCH_SIZE,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=[*HealthCheck],
            report_multiple_bugs=False,
        )(given(st.sampled_from(seeds).flatmap(target.mutate))(read))
        with contextlib.suppress(_OutOfTimeError):
            while True:
                with contextlib.suppress(AssertionError):
                    test()
                minimized |= {*self._sizes}

    def replay(self, target: Target, contents: Iterable[bytes]) -> None:
        """Read the seeds, which must be valid, and other contents."""
        seeds = target.set_up(self._inputs)
        _limit_memory()
        for seed in seeds:
            self.read(target.read, seed)
        for content in contents:
            self.read(target.check, content)

    def read(self, read: Callable[[Path, bytes], object], content: bytes) -> str | None:
        """Call a reader; log and return the kind of its failure."""
        begin = content[:_MAX_CONTENT_BYTES]
        self._memory[16 : 16 + len(begin)] = begin
        self._memory[8:16] = len(begin).to_bytes(8, "little")
        self._memory[:8] = (self.executions + 1).to_bytes(8, "little")
        try:
            read(self._inputs, content)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # panics of Rust are no Exception
            kind = format_failure(error)
            if len(content) < self._sizes.get(kind, sys.maxsize):
                self._sizes[kind] = len(content)
                with self._log.open("a") as file:
                    file.write(json.dumps([kind, str(error)[:300], content.hex()]) + "\n")
            return kind
        return None


def fuzz(target: Target, seconds: float) -> TargetResult:
    """Run a target for a time; a child process that hangs or crashes is a finding."""
    result, start = TargetResult(target.name), time.monotonic()
    num_crashes = 0
    while (left := seconds - (time.monotonic() - start)) > 0 and num_crashes < _MAX_CRASHES:
        num_crashes += _run_child(result, lambda child: child.fuzz(target, left))
    result.seconds = time.monotonic() - start
    return result


def replay(target: Target, contents: Iterable[bytes]) -> TargetResult:
    """Run a target on its seeds, which it must accept, and on other contents."""
    result = TargetResult(target.name)
    _run_child(result, lambda child: child.replay(target, contents))
    return result


def _run_child(result: TargetResult, run: Callable[["_Child"], None]) -> bool:
    """Call `run` in a child process and add its findings; return True if it hung or crashed."""
    with tempfile.TemporaryDirectory(prefix="hlat-fuzz-") as directory:
        child = _Child(Path(directory))
        process = multiprocessing.get_context("fork").Process(target=child.run, args=(run,))
        process.start()
        crash = _wait(process, child)
        result.executions += child.executions
        by_kind = {one.kind: one for one in [*result.findings, *child.load_findings()]}
    if crash is not None:
        by_kind[crash] = Finding(crash, crash, child.content)
    result.findings = [*by_kind.values()]
    return crash is not None


def _wait(process: "multiprocessing.context.ForkProcess", child: "_Child") -> str | None:
    """Wait for a child process; return how it was killed or crashed, or None."""
    assert process.pid is not None
    executions, since, base_bytes = 0, time.monotonic(), 0
    problem = None
    while process.exitcode is None and problem is None:
        process.join(_POLL_S)
        num_bytes = _measure_memory(process.pid)
        if child.executions != executions:
            base_bytes = base_bytes or num_bytes
            executions, since = child.executions, time.monotonic()
        limit = TIMEOUT_S if executions else SETUP_TIMEOUT_S
        if time.monotonic() - since > limit:
            problem = f"no result within {limit:g} s"
        elif base_bytes and num_bytes > base_bytes + MEMORY_BYTES:
            problem = f"more than {MEMORY_BYTES >> 20} MiB of memory"
    if problem is not None and process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return problem
    return f"ended with {_format_exit_code(process.exitcode)}" if process.exitcode else None


def _measure_memory(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize()


def _format_exit_code(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def format_failure(error: BaseException) -> str:
    """Return the class of an exception and the innermost line of hlat in its traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_HLAT)]
    frames = [f for f in frames if "/tests/" not in f.filename and "/.venv/" not in f.filename]
    if isinstance(error, AssertionError) and not frames:  # of a target
        return str(error).partition(":")[0]
    location = ""
    if frames:
        location = f" at {frames[-1].filename.removeprefix(_HLAT)}:{frames[-1].lineno}"
    return f"{type(error).__name__}{location}"
