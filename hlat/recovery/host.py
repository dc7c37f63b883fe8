"""What a process can learn of the node it runs on, from the operating system alone.

Nothing here needs a device or the other processes.
"""

import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

_PROC = Path("/proc")


def name(environment: Mapping[str, str] = os.environ) -> str:
    """The node's name as the scheduler knows it, which is what it can exclude."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def allow_open_files(needed: int) -> int:
    """Raise this process's limit of open files to what is needed, as far as it may; return it."""
    soft, hard = (_number(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft < needed and soft < hard:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def family() -> list[int]:
    """Process ids of this process and of those that it descends from."""
    found = [os.getpid(), os.getppid()]
    while (parent := _parent(found[-1])) > 0:
        found.append(parent)
    return found


def same_command() -> list[int]:
    """Process ids of this user on this node that run the same command in the same folder.

    The same words after hlat.train make the same run. So whichever of them is no relative of this
    attempt's processes was left by an earlier one. Where there is no /proc, none are found.
    """
    own = _command(os.getpid())
    if own is None:
        return []
    numbers = sorted(int(path.name) for path in _PROC.iterdir() if path.name.isdecimal())
    return [number for number in numbers if number != os.getpid() and _command(number) == own]


def _number(limit: int) -> int:
    """A limit, with a number that none needs for none."""
    return 2**31 - 1 if limit == resource.RLIM_INFINITY else limit


def _parent(process: int) -> int:
    try:
        # The name before it, in brackets, may hold anything
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])


def _command(process: int) -> tuple[str, str, list[bytes]] | None:
    """A process's folder, program, and words after hlat.train; None: not ours to know.

    The program counts, as what starts others, such as srun, has their words among its own.
    """
    folder = _PROC / str(process)
    try:
        if folder.stat().st_uid != os.getuid():
            return None
        words = (folder / "cmdline").read_bytes().split(b"\0")
        places = [str((folder / name).readlink()) for name in ("cwd", "exe")]
        return places[0], places[1], words[words.index(b"hlat.train") :]
    except (OSError, ValueError):  # it has ended, or trains nothing
        return None
