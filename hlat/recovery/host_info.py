"""Node information of a process from the operating system, without a device or collectives."""

import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

_PROC = Path("/proc")


def get_host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the node's name in the scheduler, which can exclude it by that name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def raise_open_file_limit(num_files: int) -> int:
    """Raise the soft limit of open files to `num_files` if the hard limit allows; return it."""
    soft, hard = (
        2**31 - 1 if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < num_files and soft < hard:
        soft = min(num_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def list_ancestor_pids() -> list[int]:
    """Return the process ids of this process and its ancestors."""
    pids = [os.getpid(), os.getppid()]
    while (parent := _get_parent_pid(pids[-1])) > 0:
        pids.append(parent)
    return pids


def list_same_command_pids() -> list[int]:
    """Return the process ids of this user on this node with the same command and directory.

    Equal arguments after hlat.train give the same run, so such a process that is no relative of
    this attempt belongs to an earlier one. The list is empty on systems without /proc.
    """
    command = _read_command(os.getpid())
    if command is None:
        return []
    pids = sorted(int(path.name) for path in _PROC.iterdir() if path.name.isdecimal())
    return [pid for pid in pids if pid != os.getpid() and _read_command(pid) == command]


def _get_parent_pid(pid: int) -> int:
    try:
        # The process name comes first, in brackets, and may contain any character
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])


def _read_command(pid: int) -> tuple[str, str, list[bytes]] | None:
    """Return directory, program and arguments after hlat.train; None for other processes.

    The program is compared too, because a launcher such as srun has the same arguments.
    """
    process = _PROC / str(pid)
    try:
        if process.stat().st_uid != os.getuid():
            return None
        arguments = (process / "cmdline").read_bytes().split(b"\0")
        directory, program = (str((process / link).readlink()) for link in ("cwd", "exe"))
        return directory, program, arguments[arguments.index(b"hlat.train") :]
    except (OSError, ValueError):  # the process has ended, or is no training process
        return None
