"""What NxD's CPU mode still lacks where tensors are torch's own: gaps are filled, no number changes."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
from torch import Tensor
from torch_xla.distributed import zero_redundancy_optimizer

from tests.nxd.support import collectives


def install() -> None:
    """Fill the gaps of torch_xla, then import NxD and fill its own."""
    _nothing_is_lazy()
    _zero1_takes_cpu_tensors()
    _gradients_can_be_viewed()
    _views_can_be_sent()
    _inputs_stay_as_they_are()
    _norms_are_summed_over_replica_groups()


def _nothing_is_lazy() -> None:
    """There is one device, and what was written has been done: no client of XLA needs to start."""
    torch_xla.device = lambda *_: torch.device("cpu")
    torch_xla.sync = lambda *_, **__: None


def _zero1_takes_cpu_tensors() -> None:
    """torch_xla's ZeRO-1 asserts an XLA device, and cuts its masters from a copy that is none here:
    masters that share the weights' memory would follow them, and hide what a real device shows."""
    optimizer = zero_redundancy_optimizer.ZeroRedundancyOptimizer
    optimizer._shard_parameters = _rewritten(
        optimizer._shard_parameters,
        {
            "assert self.device.type == 'xla'": "pass",
            'param.data.to(device="cpu")': 'param.data.to(device="cpu", copy=True)',
        },
    )


def _rewritten(function: Callable[..., Any], changes: dict[str, str]) -> Callable[..., Any]:
    """The same function with other words at places that must be there once."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes.items():
        assert source.count(old) == 1, f"{function.__qualname__} has changed: {old}"
        source = source.replace(old, new)
    scope = dict(function.__globals__)
    exec(source, scope)  # torch_xla's own words
    return scope[function.__name__]


def _gradients_can_be_viewed() -> None:
    """NxD calls view() on gradients of permuted tensors: XLA's have no strides, torch's have."""
    from neuronx_distributed.modules import qkv_linear
    from neuronx_distributed.parallel_layers import layers

    for module, name in (
        (layers, "_linear_autograd_base_setup_bwd"),
        (qkv_linear, "_compute_gradients"),
    ):
        setattr(module, name, _contiguous(getattr(module, name)))


def _contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of contiguous tensors, with contiguous results."""

    def dense(value: Any) -> Any:
        return value.contiguous() if isinstance(value, Tensor) else value

    def called(*arguments: Any) -> Any:
        return tuple(map(dense, function(*map(dense, arguments))))

    return called


def _views_can_be_sent() -> None:
    """NxD's pipeline sends what a layer gives, which along dimension 1 is a permuted view."""
    send = dist.send
    dist.send = lambda tensor, **options: send(tensor.contiguous(), **options)


def _inputs_stay_as_they_are() -> None:
    """NxD's reduce-scatter over gloo sums into its input, which torch_xla's does not touch."""
    from neuronx_distributed.parallel_layers import comm

    scatter = comm.gloo_reduce_scatter
    comm.gloo_reduce_scatter = lambda output, input, *rest, **options: scatter(
        output, input.clone(), *rest, **options
    )


def _norms_are_summed_over_replica_groups() -> None:
    """With ZeRO-1, NxD gives torch lists of ranks where it wants a process group."""
    from neuronx_distributed.parallel_layers import grads

    reduce = grads.all_reduce

    def all_reduce(operation: str, tensors: Any, groups: Any, **options: Any) -> Any:
        if isinstance(groups, dist.ProcessGroup):
            return reduce(operation, tensors, groups=groups, **options)
        return collectives.all_reduce(operation, tensors, groups=groups)

    grads.all_reduce = all_reduce
