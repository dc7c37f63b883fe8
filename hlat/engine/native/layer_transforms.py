"""Activation checkpointing and torch.compile of decoder layers.

Both replace the forward of a module and leave its parameters and their names unchanged.
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

from hlat.config.config_errors import ConfigError
from hlat.config.parallelism import ActivationCheckpointing
from hlat.model.decoder import Decoder, DecoderLayer

_NUM_INPUTS_WITH_CACHE = 4
"""Number of inputs of a decoder layer that updates a KV cache; the last one is the update."""


def apply_activation_checkpointing(model: Decoder, mode: ActivationCheckpointing) -> None:
    """Recompute whole layers, or attention scores and activations only, in the backward pass."""
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        modules: list[nn.Module] = []
        if mode is ActivationCheckpointing.selective:
            modules = [layer.self_attn.core, layer.mlp.activation]
        elif mode is ActivationCheckpointing.full:
            modules = [layer]
        for module in modules:
            module.forward = partial(_checkpointed_forward, module.forward)


def apply_compile(model: Decoder, device: torch.device) -> None:
    """Compile each layer with TorchInductor; call it after `apply_activation_checkpointing`.

    Raises:
        ConfigError: TorchInductor's C++ or Triton compiler is missing.
    """
    _validate_compiler(device)
    for layer in model.layers.values():
        # layer.compile would also compile FSDP2's hooks
        compiled = torch.compile(layer.forward, fullgraph=True)
        layer.forward = partial(_dispatch_forward, layer.forward, compiled)


def _checkpointed_forward(forward: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)


def _dispatch_forward(eager: Callable[..., Any], compiled: Callable[..., Any], *inputs: Any) -> Any:
    """Run decoding eagerly: its lengths change at each call and would be recompiled each time."""
    return (compiled if len(inputs) < _NUM_INPUTS_WITH_CACHE else eager)(*inputs)


def _validate_compiler(device: torch.device) -> None:
    """Raise ConfigError if TorchInductor has no C++ compiler for a CPU or no Triton."""
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
