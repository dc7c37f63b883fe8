"""Backend of torch.compile of a device."""

import importlib.util
import os
import shutil

import torch

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config

COMPILE_BACKENDS = {"neuron": "neuron"}
"""Backend by torch device type; TorchNeuron registers `neuron`, which calls neuronx-cc."""
_DEFAULT_BACKEND = "inductor"
"""Backend of other devices: torch's own."""


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
