"""What every function here begins and ends with."""

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.utils import get_device
from neuronx_distributed.utils.model_utils import move_model_to_device
from torch import Tensor, nn


def start(tp: int | None = None, pp: int = 1) -> int:
    """Form NxD's groups, all ranks tensor-parallel unless said otherwise; returns the rank."""
    dist.init_process_group("xla", init_method="xla://")
    parallel_state.initialize_model_parallel(tp or dist.get_world_size(), pp)
    return dist.get_rank()


def on_device(module: nn.Module) -> nn.Module:
    """The module where NxD would put it, with NxD's marks on its parameters."""
    move_model_to_device(module, get_device())
    return module


def leaf(tensor: Tensor) -> Tensor:
    """A copy on the device that collects a gradient."""
    return tensor.clone().to(get_device()).requires_grad_()


def host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies in host memory."""
    xm.mark_step()
    return tuple(tensor.detach().to("cpu", copy=True) for tensor in tensors)


def filled_with(*wholes: Tensor):
    """An init_method that fills one weight after the other before NxD cuts it."""
    remaining = list(wholes)

    def init_method(whole: Tensor) -> None:
        with torch.no_grad():
            whole.copy_(remaining.pop(0))

    return init_method
