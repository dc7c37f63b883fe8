"""Node information of a process from the operating system, without a device or collectives."""

import os
import resource
import socket
from collections.abc import Mapping

import psutil


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
    process = psutil.Process()
    return [process.pid, *(parent.pid for parent in process.parents())]


def list_same_command_pids() -> list[int]:
    """Return the process ids of this user on this node with the same command and directory.

    Equal arguments after hlat.train give the same run, so such a process that is no relative of
    this attempt belongs to an earlier one.
    """
    command = _read_command(psutil.Process())
    if command is None:
        return []
    same = [process.pid for process in psutil.process_iter() if _read_command(process) == command]
    return [pid for pid in same if pid != os.getpid()]


def _read_command(process: psutil.Process) -> tuple[str, str, list[str]] | None:
    """Return directory, program and arguments after hlat.train; None for other processes.

    The program is compared too, because a launcher such as srun has the same arguments.
    """
    try:
        if process.uids().effective != os.getuid():
            return None
        arguments = process.cmdline()
        return process.cwd(), process.exe(), arguments[arguments.index("hlat.train") :]
    except (psutil.Error, ValueError):  # the process has ended, or is no training process
        return None
