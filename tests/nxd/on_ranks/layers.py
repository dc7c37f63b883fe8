"""NxD's layers on the shard of this rank of full tensors.

Activations are [batch, sequence, hidden]. A layer is initialized with the full weight.
"""

from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import mappings, parallel_state
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.utils import get_device
from torch import Tensor, nn

from tests.nxd.on_ranks.start import filled_with, host, leaf, on_device, start

SEQUENCE = 1


def _shard(full: Tensor, axis: int, rank: int) -> Tensor:
    return full.chunk(parallel_state.get_tensor_model_parallel_size(), axis)[rank]


def column(
    x: Tensor, weight: Tensor, grad: Tensor, sequence_parallel: bool, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return output, input gradient, weight and weight gradient of a ColumnParallelLinear."""
    rank = start()
    layer = on_device(
        ColumnParallelLinear(
            weight.shape[1],
            weight.shape[0],
            bias=False,
            gather_output=False,
            dtype=x.dtype,
            init_method=filled_with(weight),
            sequence_parallel_enabled=sequence_parallel,
            sequence_dimension=SEQUENCE if sequence_parallel else None,
            **options,
        )
    )
    local = leaf(_shard(x, SEQUENCE, rank) if sequence_parallel else x)
    output = layer(local)
    output.backward(_shard(grad, -1, rank).to(output.device))
    return host(output, local.grad, layer.weight, layer.weight.grad)


def recomputed(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Any, ...]:
    """Return gradients and number of forward calls of a checkpointed ColumnParallelLinear."""
    dist.init_process_group("xla", init_method="xla://")
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=dist.get_world_size(),
        activation_checkpoint_config=ColumnParallelLinear,
    )
    output_size, input_size = weight.shape
    options = {"bias": False, "gather_output": False, "init_method": filled_with(weight)}
    model = nxd.initialize_parallel_model(
        config, lambda: nn.Sequential(ColumnParallelLinear(input_size, output_size, **options))
    )
    times = []
    (parameter,) = model.parameters()
    (layer,) = [m for m in model.modules() if isinstance(m, ColumnParallelLinear)]
    layer.register_forward_hook(lambda *_: times.append(1))
    local = leaf(x)
    output = model(local)
    output.backward(_shard(grad, -1, dist.get_rank()).to(output.device))
    return *host(local.grad, parameter.grad), len(times)


def row(x: Tensor, weight: Tensor, grad: Tensor, sequence_parallel: bool) -> tuple[Tensor, ...]:
    """Return the same as `column` for a RowParallelLinear."""
    rank = start()
    layer = on_device(
        RowParallelLinear(
            weight.shape[1],
            weight.shape[0],
            bias=False,
            input_is_parallel=True,
            init_method=filled_with(weight),
            sequence_parallel_enabled=sequence_parallel,
            sequence_dimension=SEQUENCE if sequence_parallel else None,
        )
    )
    local = leaf(_shard(x, -1, rank))
    output = layer(local)
    output.backward((_shard(grad, SEQUENCE, rank) if sequence_parallel else grad).to(output.device))
    return host(output, local.grad, layer.weight, layer.weight.grad)


def embedding(
    ids: Tensor, weight: Tensor, grad: Tensor, scattered: bool, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return output, weight and weight gradient of a ParallelEmbedding.

    `scattered`: reduce-scatter the output along the sequence with NxD's mapping.
    """
    rank = start()
    layer = on_device(ParallelEmbedding(*weight.shape, init_method=filled_with(weight), **options))
    output = layer(ids.to(get_device()))
    if scattered:
        output = mappings.reduce_scatter_to_sequence_parallel_region(output, SEQUENCE)
    output.backward((_shard(grad, SEQUENCE, rank) if scattered else grad).to(output.device))
    return host(output, layer.weight, layer.weight.grad)


def cross_entropy(logits: Tensor, labels: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the loss per token, the logits gradient, and the overwritten logits."""
    rank = start()
    local = leaf(_shard(logits, -1, rank))
    given = local * 1.0  # as of a layer: it is overwritten
    loss = parallel_cross_entropy(given, labels.to(given.device))
    loss.backward(grad.to(given.device))
    return host(loss, local.grad, given)


def kv_heads(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    grads: list[tuple[Tensor, Tensor, Tensor]],
    multiplier: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Run a GQAQKVColumnParallelLinear with the key/value head i on the ranks of group i."""
    rank = start()
    layer = _qkv(x.shape[-1], weights, multiplier, options)
    groups = parallel_state.get_kv_shared_replica_groups()
    (head,) = [i for i, group in enumerate(groups) if rank in group]
    query, *others = weights
    local = [_shard(query, 0, rank), *(w.chunk(len(groups))[head] for w in others)]
    _fill(layer, local)
    x_leaf = leaf(x)
    outputs = layer(x_leaf)
    permuted = [output.transpose(0, 1) for output in outputs]  # as attention reads them
    given = [grad.transpose(0, 1).contiguous().to(get_device()) for grad in grads[rank]]
    torch.autograd.backward(permuted, given)
    weight_grad = torch.cat([parameter.grad for parameter in layer.parameters()])
    found = host(*outputs, x_leaf.grad, weight_grad)
    return {"head": head, "outputs": found[:3], "input_grad": found[3], "weight_grad": found[4]}


def _fill(layer: GQAQKVColumnParallelLinear, weights: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(
            layer.parameters(), [torch.cat(weights)] if layer.fuse_qkv else weights, strict=True
        ):
            parameter.copy_(value)


def kv_initial(weights: tuple[Tensor, Tensor, Tensor], multiplier: int) -> tuple[Tensor, ...]:
    """Return the query, key and value weights of this rank as initialized by NxD."""
    start()
    layer = _qkv(weights[0].shape[1], weights, multiplier, {"fuse_qkv": False})
    return host(layer.weight_q, layer.weight_k, layer.weight_v)


def _qkv(
    hidden: int,
    weights: tuple[Tensor, Tensor, Tensor],
    multiplier: int,
    options: dict[str, Any],
) -> GQAQKVColumnParallelLinear:
    return on_device(
        GQAQKVColumnParallelLinear(
            hidden,
            [weights[0].shape[0], weights[1].shape[0]],
            bias=False,
            gather_output=False,
            init_method=filled_with(*weights),
            kv_size_multiplier=multiplier,
            **options,
        )
    )
