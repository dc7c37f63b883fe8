"""Measure throughput, time of the first batch, and memory of one contestant in this process.

Usage: python benchmarks/data/measure.py '{"name": ..., "scratch": ..., "seconds": ...}'   (JSON)
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from contestants import Loader, load_module, make_settings

WARM_UP_BATCHES = 20


def process_tree() -> list[psutil.Process]:
    """Return this process and its running children."""
    parent = psutil.Process()
    return [parent, *parent.children(recursive=True)]


def cpu_seconds() -> float:
    """Return the user and system time of the process and its children, also of ended ones."""
    total = 0.0
    for process in process_tree():
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def peak_rss_bytes() -> int:
    """Return the sum of the peak resident memory of the processes, including mapped files."""
    kilobytes = 0
    for process in process_tree():
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                kilobytes += int(line.split()[1])
    return kilobytes * 1024


def measure_rates(loader: Loader, seconds: float) -> dict[str, float]:
    """Read batches for `seconds` and return the rates."""
    tokens = 0
    cpu, start = cpu_seconds(), time.perf_counter()
    while time.perf_counter() - start < seconds:
        tokens += loader.next().size
    wall = time.perf_counter() - start
    return {
        "tokens": tokens,
        "tokens_per_cpu_second": tokens / (cpu_seconds() - cpu),
        "tokens_per_wall_second": tokens / wall,
    }


def measure(name: str, scratch: str, seconds: float, **changes: Any) -> dict[str, float]:
    """Open the contestant, warm up, and read batches for `seconds`."""
    settings = make_settings(name, Path(scratch), **changes)
    module = load_module(settings)
    start = time.perf_counter()
    loader = module.open_loader(settings)
    loader.next()
    first = time.perf_counter() - start
    for _ in range(WARM_UP_BATCHES):
        loader.next()
    rates = measure_rates(loader, seconds)
    return {"first_batch_seconds": first, **rates, "peak_rss_bytes": peak_rss_bytes()}


def main() -> None:
    result = measure(**json.loads(sys.argv[1]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # some contestants do not end their threads


if __name__ == "__main__":
    main()
