"""Start time of an attempt, as Unix time.

Imports and process creation take place before hlat's code can read a clock. The start time of a
process is therefore read from the kernel.
"""

import os
import sys
import time
from collections.abc import Mapping

START_TIME_VARIABLE = "HLAT_BEGAN"
"""Environment variable in processes started by hlat: start time of the parent process."""
_IMPORT_TIME = time.time()
_START_TIME_FIELD = 21
"""Index in /proc/self/stat, from 0 (proc_pid_stat(5): starttime is field 22)."""


def get_process_start_time() -> float:
    """Return the start time of this process; without /proc, the time this module was imported."""
    if sys.platform != "linux":
        return _IMPORT_TIME
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # The second field, a name in parentheses, may contain spaces and parentheses
            after_name = file.read().rpartition(")")[2].split()
    except OSError:
        return _IMPORT_TIME
    since_boot = int(after_name[_START_TIME_FIELD - 2]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def get_attempt_start_time(
    last_record_time: float | None = None, environment: Mapping[str, str] = os.environ
) -> float:
    """Return the start time of this process's attempt.

    The start time of the parent process, in an environment variable, applies to its first attempt
    only. If the parent started before the last record of earlier attempts, an earlier attempt of
    the same parent wrote that record, and this attempt started with this process.
    """
    parent_start = environment.get(START_TIME_VARIABLE)
    if parent_start is not None and (
        last_record_time is None or float(parent_start) > last_record_time
    ):
        return float(parent_start)
    # The kernel's resolution of 10 ms may place the start before the last record
    return max(get_process_start_time(), last_record_time or 0.0)
