"""Tensor and sequence parallelism of a model that knows nothing of either.

Between the tensor-parallel regions each rank has all tokens, or under sequence parallelism its
share of each sequence. A region is entered before a column-cut weight and left after a row-cut one
(Megatron's f and g, arXiv 1909.08053 section 3; 2205.05198 section 4.2.2). Hooks on the modules do
both, so that layers are compiled and recomputed with their communication.
"""

# ruff: noqa: N812  F is what the field calls it.

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hlat.config.model import Model
from hlat.engine.axis import Axis
from hlat.engine.native.mesh import Mesh
from hlat.engine.shards import kv_copies
from hlat.model.llama import Embedding, Layer, Llama
from hlat.model.loss import WHOLE, Vocabulary


class Regions:
    """How tensor-parallel regions are entered and left."""

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        """Regions of the ranks along the tensor-parallel axis."""
        self.axis, self._sequence_parallel = mesh.tp, mesh.sequence_parallel
        width = -(-vocab_size // self.axis.size)
        first = self.axis.rank * width
        whole = self.axis.size == 1
        self.vocabulary = WHOLE if whole else Vocabulary(first, self.axis.gather, width)

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Let each rank have all tokens meanwhile, of sequences that cannot be shared evenly."""
        shared, self._sequence_parallel = self._sequence_parallel, False
        try:
            yield
        finally:
            self._sequence_parallel = shared

    def enter(self, x_BSH: Tensor) -> Tensor:
        """What each rank needs of the tokens: all of them. Gradients are summed on the way back."""
        if self.axis.size == 1:
            return x_BSH
        function = _Gather if self._sequence_parallel else _Copy
        return _apply(function, x_BSH, self.axis)

    def leave(self, y_BSH: Tensor) -> Tensor:
        """The sum of what the ranks found, of all tokens or of this rank's share."""
        if self.axis.size == 1:
            return y_BSH
        function = _Scatter if self._sequence_parallel else _Sum
        return _apply(function, y_BSH, self.axis)


def parallelize(model: Llama, config: Model, regions: Regions) -> None:
    """Let the modules of a model, whose weights are shards, enter and leave regions."""
    axis = regions.axis
    if axis.size == 1:
        return
    if model.embed_tokens is not None:
        model.embed_tokens.forward = partial(  # type: ignore[method-assign]
            _embed, model.embed_tokens, regions.vocabulary.first, regions.leave
        )
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        layer.self_attn.queries_per_group //= kv_copies(config, axis.size)
        for module in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
            module.register_forward_pre_hook(partial(_before, regions.enter))
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(partial(_after, regions.leave))


def _before(enter: Callable[[Tensor], Tensor], module: nn.Module, inputs: tuple[Any]) -> tuple[Any]:
    return (enter(inputs[0]),)


def _after(
    leave: Callable[[Tensor], Tensor], module: nn.Module, inputs: tuple[Any], output: Tensor
) -> Tensor:
    return leave(output)


def _embed(
    module: Embedding, first: int, leave: Callable[[Tensor], Tensor], tokens_BS: Tensor
) -> Tensor:
    """Rows of this rank's part of the vocabulary, zeros for tokens of the others."""
    local_BS = tokens_BS - first
    here_BS = (local_BS >= 0) & (local_BS < len(module.weight))
    x_BSH = F.embedding(local_BS.where(here_BS, 0), module.weight)
    return leave(x_BSH * here_BS.unsqueeze(-1))


def _apply(function: type[torch.autograd.Function], tensor: Tensor, axis: Axis) -> Tensor:
    result: Tensor = function.apply(tensor, axis)  # type: ignore[no-untyped-call]
    return result


def _summed(tensor: Tensor, axis: Axis) -> Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    axis.sum_(tensor)
    return tensor


def _gathered(x_BsH: Tensor, axis: Axis) -> Tensor:
    """Join the shares of the sequences; [B, S / tp, H] to [B, S, H]."""
    return axis.gather(x_BsH).movedim(0, 1).flatten(1, 2)


def _scattered(x_BSH: Tensor, axis: Axis) -> Tensor:
    """Add up over ranks, and keep this rank's share of the sequences."""
    return axis.sum_and_scatter(torch.unflatten(x_BSH, 1, (axis.size, -1)).movedim(1, 0))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.axis), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return _summed(tensor, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gathered(tensor, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scattered(tensor, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.axis), None
