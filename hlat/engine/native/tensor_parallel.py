"""Tensor and sequence parallelism of a model without parallelism in its code.

Outside tensor-parallel regions each rank has all tokens, or under sequence parallelism a shard of
each sequence. A region starts before a column-parallel and ends after a row-parallel weight
(Megatron's f and g, arXiv 1909.08053 section 3; 2205.05198 section 4.2.2). The collectives are in
module hooks, so that layers are compiled and recomputed with them.
"""

# ruff: noqa: N812  F is the conventional name.

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hlat.config.model import ModelConfig
from hlat.distributed.device_mesh import ParallelMesh
from hlat.distributed.mesh_axis import MeshAxis
from hlat.distributed.parameter_shards import count_kv_replicas
from hlat.model.attention import Attention
from hlat.model.decoder import Decoder, DecoderLayer
from hlat.model.decoder_spec import list_module_parameters
from hlat.model.linear import Embedding
from hlat.model.loss import FULL_VOCAB, VocabShard
from hlat.model.norm import ProjectionNorm
from hlat.model.parameter_spec import ShardingRule

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
    model: Decoder, config: ModelConfig, regions: TensorParallelRegions
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
        _apply_to_attention(layer.self_attn, config, axis)
    copy_hook = partial(_copy_to_region_hook, regions.copy_to_tensor_parallel_region)
    reduce_hook = partial(_reduce_from_region_hook, reduce_from_region)
    for path, rule in _list_region_boundaries(model, config):
        if rule is ShardingRule.column:
            model.get_submodule(path).register_forward_pre_hook(copy_hook)
        else:
            model.get_submodule(path).register_forward_hook(reduce_hook)


def _list_region_boundaries(
    model: Decoder, config: ModelConfig
) -> Iterable[tuple[str, ShardingRule]]:
    """Return modules with a region that starts at the input (column) or ends at the output."""
    boundaries: dict[tuple[str, ShardingRule], None] = {}
    for parameter in list_module_parameters(config):
        path, _, leaf = parameter.name.rpartition(".")
        is_weight = leaf == "weight" and len(parameter.shape) > 1
        is_boundary = parameter.sharding in (ShardingRule.column, ShardingRule.row)
        if is_weight and is_boundary and _has_submodule(model, path):
            boundaries[parameter.region or path, parameter.sharding] = None
    return boundaries


def _apply_to_attention(attention: Attention, config: ModelConfig, axis: MeshAxis) -> None:
    """Set the number of local query heads, and let norms over all heads sum over ranks."""
    num_replicas = count_kv_replicas(config, axis.size)
    attention.queries_per_group //= num_replicas
    for norm, replicas in ((attention.q_norm, 1), (attention.k_norm, num_replicas)):
        if isinstance(norm, ProjectionNorm):
            norm.all_reduce = partial(_sum_over_shards, axis, replicas)


def _sum_over_shards(axis: MeshAxis, num_replicas: int, tensor: Tensor) -> Tensor:
    """Sum over the ranks of an axis that have replicas of each shard; all use the result."""
    total: Tensor = _RegionBoundary.apply(  # type: ignore[no-untyped-call]
        tensor, axis, _all_reduce, _all_reduce
    )
    return total / num_replicas


def _has_submodule(model: Decoder, path: str) -> bool:
    """Return True if the model part, one of several pipeline stages, has a module."""
    layer = path.split(".")
    return layer[0] == "layers" and layer[1] in model.layers


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
    # torch 2.11 compiles a gradient of zero if a Function returns a tensor that it changed in place
    return tensor.view_as(tensor)


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
