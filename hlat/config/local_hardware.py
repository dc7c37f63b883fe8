"""Detection of the GPU of this machine, for the default of the hardware group.

The programs of the drivers are read, because composing a configuration does not import torch.
"""

import functools
import os
import shutil
import sys

CPU = "cpu"
"""Choice of a machine without a known GPU."""
_NO_DEVICES = ("", "-1")
"""Values of the variables of visible devices that hide all."""
_QUERIES = {
    "nvidia-smi": ("", ("--query-gpu=name", "--format=csv,noheader")),
    "rocm-smi": ("card", ("--showproductname", "--csv")),
}
"""Start of the line of a GPU, and arguments, by program."""
_PRESETS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA GeForce RTX 4090": "rtx_4090",
    "NVIDIA GeForce RTX 5090": "rtx_5090",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
}
"""Choice of the hardware group by the product name that a driver reports. Other variants, such as
those for PCIe, have other peaks."""
_TIMEOUT_S = 10.0


def choose_local_hardware() -> str:
    """Return the choice for the GPU of this machine; `cpu` if it is unknown, hidden or not used."""
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("HIP_VISIBLE_DEVICES"))
    is_hidden = any(value in _NO_DEVICES for value in visible)
    if is_hidden or "engine.device=cpu" in sys.argv:
        return CPU
    programs = map(shutil.which, _QUERIES)
    return next(filter(None, (_query_preset(path) for path in programs if path)), CPU)


@functools.lru_cache
def _query_preset(program: str) -> str | None:
    """Return the choice for the GPUs that a driver's program lists; None if it is not unique."""
    import subprocess

    start, arguments = _QUERIES[os.path.basename(program)]
    try:
        process = subprocess.Popen(
            [program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        output = process.communicate(timeout=_TIMEOUT_S)[0].decode(errors="replace")
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: a process that waits for its driver does not end
        return None
    gpus = [line for line in output.splitlines() if line.strip() and line.startswith(start)]
    found = {_find_preset(line) for line in gpus}
    return found.pop() if process.returncode == 0 and len(found) == 1 else None


def _find_preset(gpu: str) -> str | None:
    names = [field.strip() for field in gpu.split(",")]
    return next((preset for name, preset in _PRESETS.items() if name in names), None)
