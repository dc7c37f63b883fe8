"""When an attempt at a run began, in Unix time.

What a run costs before its first row, such as imports and the start of processes, happens before
any of its code could look at a clock. The kernel has noted it.
"""

import os
import sys
import time
from collections.abc import Mapping

VARIABLE = "HLAT_BEGAN"
"""Set in processes that hlat started: when the process that started them began."""
_IMPORTED = time.time()
_START_TIME = 21
"""Of the fields of /proc/self/stat, counted from 0 (proc_pid_stat(5): starttime is field 22)."""


def process_began() -> float:
    """Return when this process began; where there is no /proc, when it first asked for modules."""
    if sys.platform != "linux":
        return _IMPORTED
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # The name in parentheses, the second field, may hold spaces and parentheses itself
            after_name = file.read().rpartition(")")[2].split()
    except OSError:
        return _IMPORTED
    since_boot = int(after_name[_START_TIME - 2]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def attempt_began(
    record_ends: float | None = None, environment: Mapping[str, str] = os.environ
) -> float:
    """Return when the attempt of this process began.

    The process that started this one stands for its first attempt alone: when it began before the
    record ended, an earlier attempt of its has written there, and this one began with this process.

    Args:
        record_ends: Unix time of the last sign of life of earlier attempts; None: there were none.
        environment: Where the process that started this one tells when it began.
    """
    told = environment.get(VARIABLE)
    if told is not None and (record_ends is None or float(told) > record_ends):
        return float(told)
    # The kernel counts in hundredths of a second, which may have begun before the record ended
    return max(process_began(), record_ends or 0.0)
