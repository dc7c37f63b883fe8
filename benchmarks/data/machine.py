"""What a result was measured on."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import hlat

LIBRARIES = [
    "tokenizers",
    "gigatoken",
    "transformers",
    "sentencepiece",
    "datasets",
    "torch",
    "torchdata",
    "grain",
    "mosaicml-streaming",
    "pyarrow",
    "numpy",
]


def describe_machine() -> dict[str, Any]:
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
        | {name: metadata.version(name) for name in LIBRARIES},
    }
