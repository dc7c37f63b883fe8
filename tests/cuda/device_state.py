"""Allocator counters and synchronization checks, which only CUDA devices have."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def forbid_synchronization(device: str) -> Iterator[None]:
    """Raise RuntimeError if the host waits for the device; torch detects most operations."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measure_peak_bytes(device: str, work: Callable[[], object]) -> int | None:
    """Call a function; return the peak of its allocated bytes, or None on a CPU."""
    if device != "cuda":
        work()
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
