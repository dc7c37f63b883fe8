"""Configuration of malloc, in new processes."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="configures the malloc of glibc"
)
NUM_BYTES = 64 << 20
PROGRAM = f"""
import ctypes, sys
from pathlib import Path
from hlat.engine.native.host_memory import keep_freed_memory, release_freed_memory

def read_resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

print(sys.argv[1] != "leave" and keep_freed_memory())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = read_resident_bytes()
block = libc.malloc(ctypes.c_size_t({NUM_BYTES}))
ctypes.memset(block, 1, {NUM_BYTES})
libc.free(block)
if sys.argv[1] == "release":
    release_freed_memory()
print(read_resident_bytes() - before)
"""


def run_program(argument: str, **environment: str) -> tuple[bool, int]:
    """Return whether malloc was configured, and the bytes that a freed block leaves resident."""
    inherited = {key: value for key, value in os.environ.items() if "MALLOC_" not in key}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    is_configured, num_bytes = done.stdout.split()
    return is_configured == "True", int(num_bytes)


def test_freed_memory_is_kept() -> None:
    is_configured, num_bytes = run_program("keep")
    assert is_configured
    assert num_bytes > 0.9 * NUM_BYTES
    assert run_program("leave")[1] < 0.1 * NUM_BYTES


def test_kept_memory_is_released() -> None:
    is_configured, num_bytes = run_program("release")
    assert is_configured
    assert num_bytes < 0.1 * NUM_BYTES


def test_environment_of_malloc_is_respected() -> None:
    is_configured, num_bytes = run_program("keep", MALLOC_MMAP_THRESHOLD_="65536")
    assert not is_configured
    assert num_bytes < 0.1 * NUM_BYTES
