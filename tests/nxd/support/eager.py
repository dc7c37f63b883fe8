"""Additions to NxD's CPU mode for CPU tensors of torch; they change no values."""

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
    """Patch torch_xla, then import NxD and patch it."""
    _disable_lazy_execution()
    _allow_cpu_tensors_in_zero1()
    _make_gradients_contiguous()
    _send_contiguous_tensors()
    _clone_reduce_scatter_inputs()
    _all_reduce_norms_over_rank_lists()


def _disable_lazy_execution() -> None:
    """Return the CPU as the device and do nothing in sync, so no XLA client starts."""
    torch_xla.device = lambda *_: torch.device("cpu")
    torch_xla.sync = lambda *_, **__: None


def _allow_cpu_tensors_in_zero1() -> None:
    """Remove an assertion of an XLA device, and copy the master weights: on a CPU, `to` returns the
    memory of the weights, so master weights would change with them, unlike on a device."""
    optimizer = zero_redundancy_optimizer.ZeroRedundancyOptimizer
    optimizer._shard_parameters = _replace_source(
        optimizer._shard_parameters,
        {
            "assert self.device.type == 'xla'": "pass",
            'param.data.to(device="cpu")': 'param.data.to(device="cpu", copy=True)',
        },
    )


def _replace_source(function: Callable[..., Any], changes: dict[str, str]) -> Callable[..., Any]:
    """Return a function with replaced source text; each old text must occur once."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes.items():
        assert source.count(old) == 1, f"{function.__qualname__} has changed: {old}"
        source = source.replace(old, new)
    scope = dict(function.__globals__)
    exec(source, scope)  # source of torch_xla
    return scope[function.__name__]


def _make_gradients_contiguous() -> None:
    """Make gradients contiguous: NxD calls view() on permuted ones, which XLA permits."""
    from neuronx_distributed.modules import qkv_linear
    from neuronx_distributed.parallel_layers import layers

    for module, name in (
        (layers, "_linear_autograd_base_setup_bwd"),
        (qkv_linear, "_compute_gradients"),
    ):
        setattr(module, name, _contiguous(getattr(module, name)))


def _contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its arguments and results are contiguous."""

    def dense(value: Any) -> Any:
        return value.contiguous() if isinstance(value, Tensor) else value

    def called(*arguments: Any) -> Any:
        return tuple(map(dense, function(*map(dense, arguments))))

    return called


def _send_contiguous_tensors() -> None:
    """Send contiguous tensors: layers with sequence dimension 1 return permuted views."""
    send = dist.send
    dist.send = lambda tensor, **options: send(tensor.contiguous(), **options)


def _clone_reduce_scatter_inputs() -> None:
    """Copy the input: NxD's reduce-scatter over gloo changes it, torch_xla's does not."""
    from neuronx_distributed.parallel_layers import comm

    scatter = comm.gloo_reduce_scatter
    comm.gloo_reduce_scatter = lambda output, input, *rest, **options: scatter(
        output, input.clone(), *rest, **options
    )


def _all_reduce_norms_over_rank_lists() -> None:
    """Accept lists of ranks, which NxD passes with ZeRO-1 instead of a process group."""
    from neuronx_distributed.parallel_layers import grads

    reduce = grads.all_reduce

    def all_reduce(operation: str, tensors: Any, groups: Any, **options: Any) -> Any:
        if isinstance(groups, dist.ProcessGroup):
            return reduce(operation, tensors, groups=groups, **options)
        return collectives.all_reduce(operation, tensors, groups=groups)

    grads.all_reduce = all_reduce
