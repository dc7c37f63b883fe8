"""What all benchmarks share: a summary of repetitions, and what they were measured on."""

import os
import platform
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

import hlat


def spread(values: list[float]) -> dict[str, float]:
    """Median and range, to four digits."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return {k: float(f"{v:.4g}") for k, v in (("median", middle), ("min", low), ("max", high))}


def describe_machine(libraries: list[str]) -> dict[str, Any]:
    """Processor, load and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "load_at_end": round(os.getloadavg()[1], 2),
        "versions": {"hlat": hlat.__version__}
        | {name: metadata.version(name) for name in libraries},
    }
