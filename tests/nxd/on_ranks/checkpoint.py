"""Resume and conversion of NxD's checkpoints."""

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from neuronx_distributed.scripts.checkpoint_converter import CheckpointConverterBase
from neuronx_distributed.utils import get_device
from torch import Tensor, nn

from tests.nxd.on_ranks.start import host


class _Product(nn.Module):
    """Dot product: the gradient of the weight is the input."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def resumed(
    folder: str, initial: Tensor, other: Tensor, gradient: Tensor, masters_saved: bool
) -> tuple[Tensor, ...]:
    """Train a step, save, load into a run with other initial weights, train a step.

    Return the weights of the second run after loading and after its step.
    """
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
    """Run NxD's converter between full models and sharded checkpoints."""
    converter = CheckpointConverterBase()
    converter.run(converter.get_arg_parser().parse_args(arguments))
