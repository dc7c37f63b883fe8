"""Node information of a process from the operating system, without a device or collectives."""

import os
import resource
import socket
from collections.abc import Mapping


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
