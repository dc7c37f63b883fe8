"""Activation checkpointing and torch.compile of decoder layers.

Both replace the forward of a module and leave its parameters and their names unchanged.
"""

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
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
        if mode is ActivationCheckpointing.selective:
            layer.self_attn.core = _Checkpointed(layer.self_attn.core)
            for network in [*layer.mlp.modules()]:
                activation = getattr(network, "activation", None)
                if isinstance(activation, nn.Module):
                    network.activation = _Checkpointed(activation)
        elif mode is ActivationCheckpointing.full:
            _replace_forward(layer, partial(_checkpointed_forward, layer.forward))


def apply_compile(model_parts: Iterable[Decoder], backend: str) -> None:
    """Compile each kind of layers with a backend; call it after `apply_activation_checkpointing`.

    Dynamo limits the graphs of a code object, and treats numbers as variables that differ between
    calls of code with the same name. Each kind therefore has its own code. It needs one graph for
    training and one for evaluation, however many layers and kinds there are.
    """
    compiled: dict[tuple[bool, bool], Callable[..., Any]] = {}
    for layer in (layer for part in model_parts for layer in part.layers.values()):
        assert isinstance(layer, DecoderLayer)
        kind = (layer.has_rope, layer.is_sliding)
        if kind not in compiled:
            code = _call.__code__.replace(co_name=f"layers_{len(compiled)}")
            function = FunctionType(code, globals())
            compiled[kind] = torch.compile(function, fullgraph=True, backend=backend)
        # layer.compile would also compile FSDP2's hooks
        compiled_forward = partial(compiled[kind], layer.forward)
        _replace_forward(layer, partial(_dispatch_forward, layer.forward, compiled_forward))


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


def _call(forward: Callable[..., Any], *inputs: Any) -> Any:
    return forward(*inputs)


class _Checkpointed(nn.Module):
    """A module without parameters that the backward pass recomputes.

    Dynamo would compile each layer separately if the forward of its modules were replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return _checkpointed_forward(self.module, *inputs)


def _checkpointed_forward(forward: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)


def _dispatch_forward(eager: Callable[..., Any], compiled: Callable[..., Any], *inputs: Any) -> Any:
    """Run decoding eagerly: its lengths change at each call and would be recompiled each time."""
    return (compiled if len(inputs) < _NUM_INPUTS_WITH_CACHE else eager)(*inputs)
