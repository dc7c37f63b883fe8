"""Reuse of freed memory on a CPU.

glibc returns the memory of large freed tensors, and of the end of its heap, to the kernel. The next
step allocates the same sizes, and the kernel clears their pages again.
"""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's malloc.h."""
_MALLOC_VARIABLES = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
)


def is_glibc() -> bool:
    """Return True if malloc is that of glibc."""
    return platform.libc_ver()[0] == "glibc"


def keep_freed_memory() -> bool:
    """Configure malloc to reuse freed memory for later tensors; return False if it is unchanged.

    Do nothing with another C library, or if the environment configures malloc (mallopt(3)). The
    peak memory of a process with the same sizes in each step is unchanged.
    """
    if not is_glibc() or any(name in os.environ for name in _MALLOC_VARIABLES):
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1))


def release_freed_memory() -> None:
    """Return free memory to the kernel, such as that of a compiler."""
    if is_glibc():
        ctypes.CDLL(None).malloc_trim(0)
