"""Bubblewrap sandbox for generated programs.

A program is a Python text in a separate process without network, environment and input. It reads
the Python installation and the system's libraries, writes to one empty tmpfs, and has limits on
time, memory, processes, files and output. bwrap(1) creates the namespaces without privileges. A
filter denies system calls that reach keyrings, shared memory and other network families.
"""

import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, NamedTuple

from hlat.config.config_errors import ConfigError
from hlat.evaluate import seccomp_filter

HOME_DIR = "/home"
_POLL_INTERVAL_S = 0.05
_SYSTEM_DIRS = ("/usr", "/lib", "/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class ResourceLimits:
    """Resource limits of one program.

    Attributes:
        seconds: Wall-clock time.
        cpu_seconds: CPU time of each process.
        memory_bytes: Address space of each process.
        num_processes: Processes and threads at a time.
        disk_bytes: All files together.
        file_bytes: Each file.
        num_files: Files and directories.
        num_open_files: File descriptors of each process.
        output_bytes: Output on stdout and stderr.
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
class ProgramResult:
    """Result of a program.

    Attributes:
        exit_code: Exit code; None if the program was killed.
        output: Its stdout and stderr, up to the limit.
        kill_reason: Limit that the program exceeded; empty if it was not killed.
    """

    exit_code: int | None
    output: str
    kill_reason: str = ""


class _Sandbox(NamedTuple):
    """Process of bwrap, id of the first process in its PID namespace, and file of the output.

    In a weak sandbox, the process is Python and there is no id.
    """

    process: "subprocess.Popen[bytes]"
    init_pid: int | None
    output: IO[bytes]


def validate_isolation(isolated: bool = True) -> None:
    """Raise ConfigError if bubblewrap is missing or cannot isolate a program on this machine.

    A weak sandbox (`isolated` is False) needs the filter of system calls only.
    """
    if not seccomp_filter.is_supported_machine():
        raise ConfigError(
            f"generated programs run with a filter of system calls, which {sys.platform} on "
            f"{platform.machine()} does not have; score the samples on Linux on x86_64 or aarch64"
        )
    if not isolated:
        return
    remedy = (
        "score the samples on a Linux machine that allows user namespaces, or accept limits on "
        "time and memory alone with accept_weak_sandbox=true"
    )
    if shutil.which("bwrap") is None:
        raise ConfigError(
            "generated programs need bubblewrap, and bwrap is not on the PATH; install it (apt "
            f"install bubblewrap), {remedy}"
        )
    result = run_program("print('ready')")
    if (result.exit_code, result.output) != (0, "ready\n"):
        reason = result.kill_reason or result.output.strip() or f"exit code {result.exit_code}"
        raise ConfigError(f"bubblewrap cannot isolate generated programs ({reason}); {remedy}")


def run_program(
    program: str, limits: ResourceLimits | None = None, isolated: bool = True
) -> ProgramResult:
    """Run one program."""
    return _run_programs([(program, ())], limits or ResourceLimits(), isolated)


def run_tests(
    test_program: str, program: str, limits: ResourceLimits | None = None, isolated: bool = True
) -> ProgramResult:
    """Run a test program and the program under test in two sandboxes connected by pipes.

    Each program reads from the file descriptor `sys.argv[2]` and writes to `sys.argv[3]`. The end
    of the test program determines the result and kills the program under test.
    """
    calls, answers = os.pipe(), os.pipe()
    programs = [(test_program, (answers[0], calls[1])), (program, (calls[0], answers[1]))]
    return _run_programs(programs, limits or ResourceLimits(), isolated)


def _run_programs(
    programs: Sequence[tuple[str, tuple[int, ...]]], limits: ResourceLimits, isolated: bool
) -> ProgramResult:
    with ExitStack() as stack:
        try:
            sandboxes = [
                stack.enter_context(_start_sandbox(program, pipe_fds, limits, isolated))
                for program, pipe_fds in programs
            ]
        finally:  # the parent closes its copies, so that each reads EOF when the other ends
            for fd in (fd for _, pipe_fds in programs for fd in pipe_fds):
                os.close(fd)
        return _wait_for_result(sandboxes, limits)


@contextmanager
def _start_sandbox(
    program: str, pipe_fds: tuple[int, ...], limits: ResourceLimits, isolated: bool
) -> Iterator[_Sandbox]:
    """Start a program, and kill all of its processes at exit of the context."""
    with ExitStack() as stack:
        source, output, call_filter = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)
        )
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        for file, content in (
            (source, program.encode()),
            (call_filter, seccomp_filter.build_filter()),
        ):
            file.write(content)
            file.seek(0)
        status_fd, child_status_fd = os.pipe()
        status = stack.enter_context(open(status_fd, encoding="utf-8"))
        child_start_fd, start_fd = os.pipe()
        stack.callback(os.close, start_fd)
        fds = (source.fileno(), *pipe_fds, child_start_fd)
        try:
            process = subprocess.Popen(
                _build_command(fds, (child_status_fd, call_filter.fileno()), limits, isolated),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(*fds, child_status_fd, call_filter.fileno()) if isolated else fds,
                env={} if isolated else {"HOME": directory},
                cwd=directory,
                start_new_session=True,
                umask=0o077,
            )
        finally:
            os.close(child_status_fd)
            os.close(child_start_fd)
        # bwrap writes one JSON object as soon as it has created the namespaces
        init_pid = json.loads(status.readline() or "{}").get("child-pid")
        stack.callback(_kill_sandbox, process, init_pid)
        with suppress(BrokenPipeError):  # the sandbox could not be created
            os.write(start_fd, b"\n")
        yield _Sandbox(process, init_pid, output)


def _build_command(
    fds: Sequence[int], bwrap_fds: tuple[int, int], limits: ResourceLimits, isolated: bool
) -> list[str]:
    """Return the command of a sandbox; `bwrap_fds` are for its status and for the filter."""
    status_fd, filter_fd = bwrap_fds
    rlimits = [
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.num_open_files),
        (resource.RLIMIT_NPROC, limits.num_processes),
        (resource.RLIMIT_CORE, 0),
    ]
    # bwrap binds its life to that of its parent before it reports its child, and too late if the
    # parent has ended until then. The program starts if the parent has received the report and has
    # not ended since: a pipe without a writer is readable.
    bootstrap = (
        "import os, resource, select, sys; start_fd = int(sys.argv.pop()); "
        "os.read(start_fd, 1) and not select.select([start_fd], [], [], 0)[0] "
        "or sys.exit('the parent has ended'); os.close(start_fd); "
        f"[resource.setrlimit(k, (v, v)) for k, v in {rlimits}]; "
        "exec(compile(open(int(sys.argv[1])).read(), 'program', 'exec'))"
    )
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    python_command = [python, "-I", "-S", "-B"]
    start = [*python_command, os.path.abspath(seccomp_filter.__file__)]
    command = [*python_command, "-c", bootstrap, *map(str, fds)]
    if not isolated:
        return [*start, "weak", *command]
    # The kernel does not limit the number of root's processes, so that root changes its user, which
    # may not read the Python installation: bwrap mounts it from a bind mount.
    prefix, is_root = os.path.realpath(sys.base_prefix), os.geteuid() == 0
    command = [
        *(shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--disable-userns"),
        *("--as-pid-1", "--die-with-parent", "--uid", "1000", "--gid", "1000"),
        *("--clearenv", "--setenv", "HOME", HOME_DIR, "--chdir", HOME_DIR),
        *(option for path in _SYSTEM_DIRS for option in _mount_system_dir(path)),
        *("--ro-bind", "/mnt" if is_root else prefix, prefix),
        *(option for path in _DEVICES for option in ("--dev-bind", path, path)),
        *("--perms", "0700", "--size", str(limits.disk_bytes), "--tmpfs", HOME_DIR),
        *("--remount-ro", "/", "--json-status-fd", str(status_fd)),
        *("--seccomp", str(filter_fd), *command),
    ]
    if not is_root:
        return [*start, "isolated", *command]
    as_nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    script = f'mount --bind "$0" /mnt && exec {as_nobody} "$@"'
    unshare = shutil.which("unshare") or "unshare"
    return [*start, "isolated", unshare, "--mount", "sh", "-c", script, prefix, *command]


def _mount_system_dir(path: str) -> list[str]:
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind-try", path, path]


def _kill_sandbox(process: "subprocess.Popen[bytes]", init_pid: int | None) -> None:
    """Kill all processes of a sandbox.

    bwrap returns after the last process of the PID namespace has ended (pid_namespaces(7)).
    """
    with suppress(ProcessLookupError):
        if init_pid is None:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.poll() is None:
            os.kill(init_pid, signal.SIGKILL)
    process.wait()


def _wait_for_result(sandboxes: Sequence[_Sandbox], limits: ResourceLimits) -> ProgramResult:
    """Wait until the first sandbox ends or any of them exceeds a limit."""
    deadline = time.monotonic() + limits.seconds
    first, reason, has_ended = sandboxes[0], "", False
    while not has_ended and not reason:
        with suppress(subprocess.TimeoutExpired):
            first.process.wait(_POLL_INTERVAL_S)
            has_ended = True
        if any(os.fstat(one.output.fileno()).st_size > limits.output_bytes for one in sandboxes):
            reason = f"it printed more than {limits.output_bytes} bytes"
        elif any(_count_files(one.init_pid, limits) > limits.num_files for one in sandboxes):
            reason = f"it created more than {limits.num_files} files"
        elif time.monotonic() > deadline and not has_ended:
            reason = f"timed out after {limits.seconds:g} s"
    output = os.pread(first.output.fileno(), limits.output_bytes, 0).decode(errors="replace")
    return ProgramResult(None if reason else first.process.returncode, output, reason)


def _count_files(init_pid: int | None, limits: ResourceLimits) -> int:
    """Return the number of files in the home directory of a sandbox, 0 if it is not mounted."""
    try:
        home = os.statvfs(f"/proc/{init_pid}/root{HOME_DIR}")
    except OSError:
        return 0
    # Before the sandbox changes its root, the path is a directory of this machine
    is_mounted = home.f_blocks * home.f_frsize == limits.disk_bytes
    return home.f_files - home.f_ffree - 1 if is_mounted else 0
