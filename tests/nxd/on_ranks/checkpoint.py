"""NxD's checkpoints: what a run goes on from."""

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from neuronx_distributed.scripts.checkpoint_converter import CheckpointConverterBase
from neuronx_distributed.utils import get_device
from torch import Tensor, nn

from tests.nxd.on_ranks.start import host


class _Product(nn.Module):
    """A weight whose gradient is the input."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def resumed(
    folder: str, initial: Tensor, other: Tensor, gradient: Tensor, masters_saved: bool
) -> tuple[Tensor, ...]:
    """Train a step, save, load into a run that began elsewhere, train a step: the weights there
    after loading and after that step."""
    dist.init_process_group("xla", init_method="xla://")
    config = nxd.neuronx_distributed_config(
        optimizer_config={"zero_one_enabled": True, "grad_clipping": False},
        mixed_precision_config={"use_master_weights_in_ckpt": masters_saved},
    )

    def begin(weight: Tensor):
        model = nxd.initialize_parallel_model(config, lambda: _Product(weight))
        parameters = list(model.parameters())
        return model, nxd.initialize_parallel_optimizer(config, torch.optim.SGD, parameters, lr=1.0)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(gradient.to(get_device())).backward()
        optimizer.step()
        optimizer.zero_grad()
        xm.mark_step()

    model, optimizer = begin(initial)
    train(model, optimizer)
    nxd.save_checkpoint(folder, tag="1", model=model, optimizer=optimizer)
    model, optimizer = begin(other)
    nxd.load_checkpoint(folder, tag="1", model=model, optimizer=optimizer)
    (loaded,) = host(*model.parameters())
    train(model, optimizer)
    return loaded, *host(*model.parameters())


def converted(arguments: list[str]) -> None:
    """Run NxD's converter between whole models and ranks' files."""
    converter = CheckpointConverterBase()
    converter.run(converter.get_arg_parser().parse_args(arguments))
