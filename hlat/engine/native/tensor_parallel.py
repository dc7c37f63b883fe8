"""Tensor and sequence parallelism of a model without parallelism in its code.

Outside tensor-parallel regions each rank has all tokens, or under sequence parallelism a shard of
each sequence. A region starts before a column-parallel and ends after a row-parallel weight
(Megatron's f and g, arXiv 1909.08053 section 3; 2205.05198 section 4.2.2). The collectives are in
module hooks, so that layers are compiled and recomputed with them.
"""

# ruff: noqa: N812  F is the conventional name.

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hlat.config.model import ModelConfig
from hlat.engine.mesh_axis import MeshAxis
from hlat.engine.native.device_mesh import ParallelMesh
from hlat.engine.parameter_shards import count_kv_replicas
from hlat.model.llama import DecoderLayer, Embedding, Llama
from hlat.model.loss import FULL_VOCAB, VocabShard

_Collective = Callable[[Tensor, MeshAxis], Tensor]


class TensorParallelRegions:
    """Collectives at the boundaries of tensor-parallel regions, and the shard of the vocabulary."""

    def __init__(self, mesh: ParallelMesh, vocab_size: int) -> None:
        self.axis, self._sequence_parallel = mesh.tp, mesh.sequence_parallel
        self.vocab_shard = FULL_VOCAB
        if self.axis.size > 1:
            shard_size = -(-vocab_size // self.axis.size)
            start = self.axis.rank * shard_size
            self.vocab_shard = VocabShard(start, self.axis.all_gather, shard_size)

    @contextmanager
    def disable_sequence_parallel(self) -> Iterator[None]:
        """Disable sequence parallelism in the context, for sequences of any length."""
        enabled, self._sequence_parallel = self._sequence_parallel, False
        try:
            yield
        finally:
            self._sequence_parallel = enabled

    def copy_to_tensor_parallel_region(self, x_BSH: Tensor) -> Tensor:
        """Return the activations of all tokens; all-reduce the gradient in the backward pass."""
        if self.axis.size == 1:
            return x_BSH
        if self._sequence_parallel:
            return self._apply(x_BSH, _all_gather_sequence, _reduce_scatter_sequence)
        return self._apply(x_BSH, _identity, _all_reduce)

    def reduce_from_tensor_parallel_region(self, y_BSH: Tensor) -> Tensor:
        """Sum partial outputs over ranks; under sequence parallelism return this rank's tokens."""
        if self.axis.size == 1:
            return y_BSH
        if self._sequence_parallel:
            return self._apply(y_BSH, _reduce_scatter_sequence, _all_gather_sequence)
        return self._apply(y_BSH, _all_reduce, _identity)

    def _apply(self, tensor: Tensor, forward: _Collective, backward: _Collective) -> Tensor:
        result: Tensor = _RegionBoundary.apply(  # type: ignore[no-untyped-call]
            tensor, self.axis, forward, backward
        )
        return result


def apply_tensor_parallel(
    model: Llama, config: ModelConfig, regions: TensorParallelRegions
) -> None:
    """Register the region boundaries on the modules of a model of sharded weights."""
    axis = regions.axis
    if axis.size == 1:
        return
    reduce_from_region = regions.reduce_from_tensor_parallel_region
    if model.embed_tokens is not None:
        model.embed_tokens.forward = partial(  # type: ignore[method-assign]
            _embed_vocabulary_shard,
            model.embed_tokens,
            regions.vocab_shard.start_index,
            reduce_from_region,
        )
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        layer.self_attn.queries_per_group //= count_kv_replicas(config, axis.size)
        hook = partial(_copy_to_region_hook, regions.copy_to_tensor_parallel_region)
        for module in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
            module.register_forward_pre_hook(hook)
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(partial(_reduce_from_region_hook, reduce_from_region))


def _copy_to_region_hook(
    copy_to_region: Callable[[Tensor], Tensor], module: nn.Module, inputs: tuple[Any]
) -> tuple[Any]:
    return (copy_to_region(inputs[0]),)


def _reduce_from_region_hook(
    reduce_from_region: Callable[[Tensor], Tensor],
    module: nn.Module,
    inputs: tuple[Any],
    output: Tensor,
) -> Tensor:
    return reduce_from_region(output)


def _embed_vocabulary_shard(
    module: Embedding,
    first_token: int,
    reduce_from_region: Callable[[Tensor], Tensor],
    tokens_BS: Tensor,
) -> Tensor:
    """Embed the tokens of this rank's vocabulary shard as their rows and other tokens as zeros."""
    local_BS = tokens_BS - first_token
    is_local_BS = (local_BS >= 0) & (local_BS < len(module.weight))
    x_BSH = F.embedding(local_BS.where(is_local_BS, 0), module.weight)
    return reduce_from_region(x_BSH * is_local_BS.unsqueeze(-1))


def _identity(tensor: Tensor, axis: MeshAxis) -> Tensor:
    return tensor.view_as(tensor)


def _all_reduce(tensor: Tensor, axis: MeshAxis) -> Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(tensor)
    return tensor


def _all_gather_sequence(x_BsH: Tensor, axis: MeshAxis) -> Tensor:
    """Gather the shards of the sequences; [B, S / tp, H] to [B, S, H]."""
    return axis.all_gather(x_BsH).movedim(0, 1).flatten(1, 2)


def _reduce_scatter_sequence(x_BSH: Tensor, axis: MeshAxis) -> Tensor:
    """Sum over ranks and return this rank's shard of the sequences; [B, S, H] to [B, S / tp, H]."""
    return axis.reduce_scatter(torch.unflatten(x_BSH, 1, (axis.size, -1)).movedim(1, 0))


class _RegionBoundary(torch.autograd.Function):
    """One collective in the forward pass and its conjugate in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, axis: MeshAxis, forward: _Collective, backward: _Collective
    ) -> Tensor:
        ctx.axis, ctx.collective = axis, backward
        return forward(tensor, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.collective(gradient, ctx.axis), None, None, None
