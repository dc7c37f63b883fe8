"""Initialization of ranks, and transfers between device and host."""

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.utils import get_device
from neuronx_distributed.utils.model_utils import move_model_to_device
from torch import Tensor, nn


def start(tp: int | None = None, pp: int = 1) -> int:
    """Initialize NxD's groups (default: all ranks tensor-parallel) and return the rank."""
    dist.init_process_group("xla", init_method="xla://")
    parallel_state.initialize_model_parallel(tp or dist.get_world_size(), pp)
    return dist.get_rank()


def on_device(module: nn.Module) -> nn.Module:
    """Move a module to NxD's device, which sets NxD's attributes of its parameters."""
    move_model_to_device(module, get_device())
    return module


def leaf(tensor: Tensor) -> Tensor:
    """Return a copy on the device that requires a gradient."""
    return tensor.clone().to(get_device()).requires_grad_()


def host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies in host memory."""
    xm.mark_step()
    return tuple(tensor.detach().to("cpu", copy=True) for tensor in tensors)


def filled_with(*full_tensors: Tensor):
    """Return an init_method that fills the full weights in order before NxD shards them."""
    remaining = list(full_tensors)

    def init_method(full: Tensor) -> None:
        with torch.no_grad():
            full.copy_(remaining.pop(0))

    return init_method
