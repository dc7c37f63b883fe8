"""Ids of processes on this node."""

import os

import psutil


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
