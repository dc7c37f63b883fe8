"""Print versions and properties of the device of a benchmark.

Usage: python benchmarks/gpu/describe.py DEVICE
"""

import importlib.metadata
import subprocess
import sys
from typing import Any

import torch
from measure import print_result

from benchmarks.common import describe_machine
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.engine.device_checks import run_burn_in

LIBRARIES = ["torch", "triton", "transformers", "numpy", "pyarrow", "tokenizers", "hydra-core"]
QUERY = (
    "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory,temperature.gpu"
)


PRESETS = {"H100": "h100_p5", "H200": "h200"}
"""Preset of conf/hardware by a part of the device's name."""


def find_peak_flops(name: str) -> float | None:
    """Return the dense bf16 peak of the data sheet in FLOP/s; None for an unknown device."""
    presets = [preset for part, preset in PRESETS.items() if part in name]
    if not presets:
        return None
    config = resolve_config(compose_config([f"hardware={presets[0]}", "parallelism=single"]))
    return config.hardware.peak_tflops["bf16"] * 1e12


def list_installed(libraries: list[str]) -> list[str]:
    """Return the libraries that are installed."""
    found = {item.metadata["Name"].lower() for item in importlib.metadata.distributions()}
    return [name for name in libraries if name.lower() in found]


def describe_cuda() -> dict[str, Any]:
    """Return properties of the GPU and the output of nvidia-smi."""
    properties = torch.cuda.get_device_properties(0)
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
    try:
        smi = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        smi = str(error)
    return {
        "name": properties.name,
        "peak_flops": find_peak_flops(properties.name),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvidia_smi": smi.strip().splitlines(),
        "sdp_backends": {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
        },
    }


def main() -> None:
    device = sys.argv[1]
    result = describe_machine(list_installed(LIBRARIES))
    result["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    if device == "cuda":
        result["device"] = describe_cuda()
    count, num_wrong, flops = run_burn_in(torch.device(device), torch.bfloat16)
    result["burn_in"] = {"matmuls": count, "wrong_elements": num_wrong, "flops_per_second": flops}
    print_result(result)


if __name__ == "__main__":
    main()
