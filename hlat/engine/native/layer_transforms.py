"""Activation checkpointing and torch.compile of decoder layers.

Both replace the forward of a module and leave its parameters and their names unchanged.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def apply_compile(model: Decoder, backend: str) -> None:
    """Compile each layer with a backend; call it after `apply_activation_checkpointing`."""
    for layer in model.layers.values():
        # layer.compile would also compile FSDP2's hooks
        compiled = torch.compile(layer.forward, fullgraph=True, backend=backend)
        layer.forward = partial(_dispatch_forward, layer.forward, compiled)


def _checkpointed_forward(forward: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)


def _dispatch_forward(eager: Callable[..., Any], compiled: Callable[..., Any], *inputs: Any) -> Any:
    """Run decoding eagerly: its lengths change at each call and would be recompiled each time."""
    return (compiled if len(inputs) < _NUM_INPUTS_WITH_CACHE else eager)(*inputs)
