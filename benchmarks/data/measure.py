"""One contestant in one process: how fast it is, how soon it begins, how much memory it takes.

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


def family() -> list[psutil.Process]:
    """This process and its children, those that have just ended left out."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def cpu_seconds() -> float:
    """User and system time of the process and its children, dead ones included."""
    total = 0.0
    for process in family():
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def peak_rss_bytes() -> int:
    """Sum of the peaks of resident memory over the processes, mapped files included."""
    kilobytes = 0
    for process in family():
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                kilobytes += int(line.split()[1])
    return kilobytes * 1024


def take(loader: Loader, seconds: float) -> dict[str, float]:
    """Rates over a stretch of `seconds`."""
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
    """Open the contestant, warm it up, and take batches for a while."""
    settings = make_settings(name, Path(scratch), **changes)
    module = load_module(settings)
    start = time.perf_counter()
    loader = module.open_loader(settings)
    loader.next()
    first = time.perf_counter() - start
    for _ in range(WARM_UP_BATCHES):
        loader.next()
    rates = take(loader, seconds)
    return {"first_batch_seconds": first, **rates, "peak_rss_bytes": peak_rss_bytes()}


def main() -> None:
    result = measure(**json.loads(sys.argv[1]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # some contestants do not end their threads


if __name__ == "__main__":
    main()
