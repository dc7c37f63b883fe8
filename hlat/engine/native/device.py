"""Selection and preparation of the device of a process: CPU, GPU or Trainium 2.

This includes the backend of torch.compile of the device.
"""

import importlib
import importlib.util
import os
import resource
import shutil
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat.config.config_errors import ConfigError, MissingDeviceError
from hlat.config.engine_capabilities import validate_device
from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.distributed import rank_environment
from hlat.engine.native.cpu_matmul import add_bf16_matmuls
from hlat.engine.native.host_memory import keep_freed_memory
from hlat.engine.neuron import neuron_environment

COMPILE_BACKENDS = {"neuron": "neuron"}
"""Backend of torch.compile by torch device type; TorchNeuron registers `neuron`, which calls
neuronx-cc."""
_DEFAULT_BACKEND = "inductor"
"""Backend of other devices: torch's own."""


def set_environment(config: Config) -> None:
    """Set the environment variables of compiler, recipe and determinism.

    A runtime reads them when it first accesses a device, that is, in `find_device`.
    """
    os.environ.update(
        neuron_environment.build_neuron_environment(config.compiler, config.precision)
    )
    if config.engine.deterministic:
        # Required by torch's notes on reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def find_device(config: Config, local_rank: int) -> torch.device:
    """Return the configured device; for `auto` the accelerator of the machine, else the CPU.

    A process uses the accelerator with the index of its local rank.

    Raises:
        ConfigError: The machine has no device of this name.
        MissingDeviceError: The machine has fewer devices than the layout needs.
    """
    name, accelerator = config.engine.device, _find_accelerator()
    if name == "auto":
        device = accelerator or torch.device("cpu")
    else:
        available = sorted({"cpu"} | ({accelerator.type} if accelerator else set()))
        if name.partition(":")[0] not in available:
            raise ConfigError(
                f"engine.device={name} is not on this machine; use auto or {' or '.join(available)}"
            )
        device = torch.device(name)
    if device.type == "cpu" or config.num_processes == 1:
        return device
    if local_rank >= (count := torch.accelerator.device_count()):
        raise MissingDeviceError(
            f"engine.device={device.type}: this machine has {count}, and the layout needs one for "
            f"each of {config.num_processes} processes; use a smaller layout or engine.device=cpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device.type, local_rank)


def prepare_device(config: Config, device: torch.device) -> None:
    """Validate the recipe, and set the modes of memory and determinism before the first operation.

    Rank 0 prints a warning if determinism makes the device slower.

    Raises:
        ConfigError: The device does not support the recipe.
    """
    validate_device(config, device.type)
    if device.type == "cpu":
        keep_freed_memory()
        if config.precision.compute_dtype is Dtype.bf16:
            add_bf16_matmuls()
    is_rank0 = rank_environment.read_rank_info().rank == 0
    if config.engine.deterministic and device.type == "neuron" and is_rank0:
        print(
            "WARNING: engine.deterministic=true disables TorchNeuron's Adaptive Eager Execution; "
            "set engine.deterministic=false for speed without bitwise reproducible results",
            file=sys.stderr,
        )
    torch.set_deterministic_debug_mode("error" if config.engine.deterministic else "default")
    # A debugging aid of deterministic mode that costs 6% of a step on a CPU
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def read_peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of this process without synchronizing with the device.

    Accelerators: the allocator's peak, None without an allocator of torch's. CPU: peak resident
    memory.
    """
    if device.type == "cpu":
        return _read_peak_resident_memory()
    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except (AttributeError, RuntimeError):  # XLA devices have no allocator of torch's
        return None


def _read_peak_resident_memory() -> int:
    """Return the peak resident memory of this process: VmHWM on Linux.

    Linux adds the peak of the process that started this one to ru_maxrss, for a child that shares
    its memory until exec, such as those of subprocess.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def copy_to_device(array: NDArray[np.int32] | NDArray[np.bool_], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for the device.

    The copy is asynchronous from page-locked memory only: a driver may first wait for the preceding
    work on the device before it reads pageable memory (CUDA driver API, synchronization behavior).
    """
    tensor = torch.from_numpy(array)
    if device.type != "cpu" and _has_pinned_memory():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@cache
def _has_pinned_memory() -> bool:
    """Return True if the accelerator of this machine has an allocator of page-locked memory."""
    try:
        return torch.empty(1).pin_memory().is_pinned()
    except (AttributeError, RuntimeError):  # an accelerator without such an allocator, or none
        return False


def _find_accelerator() -> torch.device | None:
    """Return the machine's accelerator; TorchNeuron registers its own when it is imported.

    torch imports it only if TORCH_DEVICE_BACKEND_AUTOLOAD is not 0.
    """
    if importlib.util.find_spec("torch_neuronx") is not None:
        importlib.import_module("torch_neuronx")
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


if __name__ == "__main__":  # launchers do not import torch; they parse device type and count
    print(_find_accelerator() or "cpu", torch.accelerator.device_count())


def select_compile_backend(config: Config, device: torch.device) -> str | None:
    """Return the backend of a device, or None if the configuration does not compile.

    Raises:
        ConfigError: The backend or its compiler is missing.
    """
    if not config.compiler.torch_compile:
        return None
    backend = COMPILE_BACKENDS.get(device.type, _DEFAULT_BACKEND)
    _validate_backend(backend, device)
    return backend


def _validate_backend(backend: str, device: torch.device) -> None:
    """Raise ConfigError if the backend, or the compiler that TorchInductor calls, is missing."""
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise ConfigError(
            f"compiler.torch_compile=true: torch.compile has no backend {backend} in this Python, "
            f"and {device.type} needs it; install TorchNeuron (docs/neuron.md), or use "
            "compiler.torch_compile=false"
        )
    if backend != _DEFAULT_BACKEND:
        return
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"compiler=inductor needs a C++ compiler, and there is no {compiler}; install one, set "
            "the environment variable CXX, or use compiler=none"
        )
    if device.type != "cpu" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"compiler=inductor needs Triton on {device.type}; pip install triton, or use "
            "compiler=none"
        )
