"""Collectives of torch_xla, implemented with gloo through host memory.

XLA's client for CPUs supports one process: its all-reduce silently returns its input, and its
all-gather aborts. The signatures are torch_xla's; arguments for compilers are not used.
"""

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo

Groups = list[list[int]] | None

_OPERATIONS = {
    xm.REDUCE_SUM: dist.ReduceOp.SUM,
    xm.REDUCE_MUL: dist.ReduceOp.PRODUCT,
    xm.REDUCE_MAX: dist.ReduceOp.MAX,
    xm.REDUCE_MIN: dist.ReduceOp.MIN,
}
_rendezvous_counter = count()


def members(groups: Groups) -> tuple[int, ...]:
    """Return the ranks of this rank's group in ascending order.

    NxD's pipeline selects its half of a gathered tensor by the index of its rank in the sorted
    group (pipeline/comm.py).
    """
    if not groups:
        return tuple(range(dist.get_world_size()))
    (local,) = [group for group in groups if dist.get_rank() in group]
    return tuple(sorted(local))


@cache
def _gloo(ranks: tuple[int, ...]) -> ProcessGroupGloo:
    """Create a group that is not registered in torch, so only its members create it."""
    store = PrefixStore(f"collectives/{ranks}", dist.distributed_c10d._get_default_store())
    return ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks))


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _reduced(operation: str, tensor: Tensor, groups: Groups, scale: float = 1.0) -> Tensor:
    """Return the reduced tensor on the host."""
    found = _host(tensor)
    options = dist.AllreduceOptions()
    options.reduceOp = _OPERATIONS[operation]
    _gloo(members(groups)).allreduce([found], options).wait()
    return found if scale == 1.0 else found * scale


def _gathered(tensor: Tensor, groups: Groups) -> list[Tensor]:
    """Return the tensors of all members on the host."""
    local, ranks = _host(tensor), members(groups)
    found = [torch.empty_like(local) for _ in ranks]
    _gloo(ranks).allgather([found], [local]).wait()
    return found


def _to_output(tensor: Tensor, like: Tensor, output: Tensor | None) -> Tensor:
    """Return a tensor on the device of the input, or copy it to `output`."""
    return tensor.to(like.device) if output is None else output.copy_(tensor)


@torch.no_grad()
def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Any:
    """Implement `xm.all_reduce`: in place for a list, out of place for a tensor."""
    if isinstance(inputs, Tensor):
        return _reduced(reduce_type, inputs, groups, scale).to(inputs.device)
    for tensor in inputs:
        tensor.copy_(_reduced(reduce_type, tensor, groups, scale))
    return inputs


@torch.no_grad()
def all_gather(
    value: Any, dim: int = 0, groups: Groups = None, output: Any = None, **_: Any
) -> Any:
    """Implement `xm.all_gather`."""
    if not isinstance(value, Tensor):
        outputs = output or [None] * len(value)
        return [all_gather(v, dim, groups, o) for v, o in zip(value, outputs, strict=True)]
    parts = _gathered(value if value.dim() else value.reshape(1), groups)
    return _to_output(torch.cat(parts, dim), value, output)


@torch.no_grad()
def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Any = None,
    **_: Any,
) -> Any:
    """Implement `xm.reduce_scatter`."""
    if not isinstance(input, Tensor):
        outputs = output or [None] * len(input)
        options = (scale, scatter_dim, shard_count, groups)
        pairs = zip(input, outputs, strict=True)
        return [reduce_scatter(reduce_type, i, *options, o) for i, o in pairs]
    ranks = members(groups)
    assert shard_count == len(ranks)
    assert input.shape[scatter_dim] % shard_count == 0
    full = _reduced(reduce_type, input, groups, scale)
    local = full.chunk(shard_count, scatter_dim)[ranks.index(dist.get_rank())]
    return _to_output(local.contiguous(), input, output)


@torch.no_grad()
def all_to_all(
    value: Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Tensor:
    """Implement `xm.all_to_all`."""
    index = members(groups).index(dist.get_rank())
    parts = [t.chunk(split_count, split_dimension)[index] for t in _gathered(value, groups)]
    return torch.cat(parts, concat_dimension).to(value.device)


@torch.no_grad()
def collective_permute(value: Tensor, pairs: Sequence[Sequence[int]]) -> Tensor:
    """Implement `xm.collective_permute`: zeros on ranks without a source."""
    sent = _gathered(value, None)
    sources = [source for source, target in pairs if target == dist.get_rank()]
    return sent[sources[0]].to(value.device) if sources else torch.zeros_like(value)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Implement `xm.rendezvous` of all ranks: all write before one returns."""
    xm.mark_step()
    store, turn = dist.distributed_c10d._get_default_store(), next(_rendezvous_counter)
    store.set(f"rendezvous/{turn}/{dist.get_rank()}", payload)
    return [store.get(f"rendezvous/{turn}/{rank}") for rank in members(None)]


def install(rendezvous_only: bool = False) -> None:
    """Replace the functions of torch_xla; its bucketized collectives call these."""
    moving = (all_reduce, all_gather, reduce_scatter, all_to_all, collective_permute)
    for function in (rendezvous,) if rendezvous_only else (*moving, rendezvous):
        setattr(xm, function.__name__, function)
