"""How each decoder layer is run: what its backward pass computes again, and whether it is compiled.

Both replace how a module is called and leave its parameters and their names alone.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hlat.config.errors import ConfigError
from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.run import Config
from hlat.model.llama import Layer, Llama

_NUM_WITH_PAST = 5
"""Inputs of a layer that keeps what it finds; the last of them is how."""


def prepare_blocks(model: Llama, config: Config, device: torch.device) -> None:
    """Let the layers of a model run as the configuration says.

    Raises:
        ConfigError: They are to be compiled, and TorchInductor finds nothing to compile with.
    """
    mode = config.parallelism.activation_checkpointing
    if config.compiler.inductor:
        _require_compiler(device)
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        for module in _recomputed(layer, mode):
            module.forward = partial(_recompute, module.forward)
        if config.compiler.inductor:
            # Not layer.compile: FSDP2's hooks around a layer are to stay outside
            compiled = torch.compile(layer.forward, fullgraph=True)
            layer.forward = partial(_run, layer.forward, compiled)  # type: ignore[method-assign]


def _recomputed(layer: Layer, mode: ActivationCheckpointing) -> list[nn.Module]:
    """The modules whose inputs are kept and whose insides are not."""
    if mode is ActivationCheckpointing.selective:
        return [layer.self_attn.core, layer.mlp.swiglu]
    return [layer] if mode is ActivationCheckpointing.full else []


def _recompute(forward: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)


def _run(eager: Callable[..., Any], compiled: Callable[..., Any], *inputs: Any) -> Any:
    """Texts that go on are longer each time: they would be compiled each time."""
    return (compiled if len(inputs) < _NUM_WITH_PAST else eager)(*inputs)


def _require_compiler(device: torch.device) -> None:
    """TorchInductor writes C++ for a CPU and Triton for everything else."""
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
