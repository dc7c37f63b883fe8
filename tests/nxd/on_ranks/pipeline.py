"""Linear layers over pipeline stages, built on the meta device like large models."""

from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state
from torch import Tensor, nn

from tests.nxd.on_ranks.start import host

HIDDEN = 4


class Block(nn.Module):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Stack(nn.Module):
    """Linear layers and a loss."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - labels).pow(2).mean()


def initialize(module: nn.Module, device: torch.device) -> None:
    """Initialize a module; NxD calls this after the meta device."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


def train(
    num_layers: int, x: Tensor, labels: Tensor, seed: int, seed_per_stage: int
) -> dict[str, Any]:
    """Return the initial weights of this stage, and loss and gradients of a step."""
    dist.init_process_group("xla", init_method="xla://")
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=dist.get_world_size(),
        pipeline_config={
            "transformer_layer_cls": Block,
            "num_microbatches": 2,
            "output_loss_value_spec": True,
            "input_names": ["x", "labels"],
            "auto_partition": True,
            "use_optimizer_wrapper": True,
        },
        model_init_config={"meta_device_init": True, "param_init_fn": initialize},
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed + seed_per_stage * stage)
    model = nxd.initialize_parallel_model(config, lambda: Stack(num_layers))
    names, parameters = zip(*model.local_named_parameters(), strict=True)
    weights = dict(zip(names, host(*parameters), strict=True))
    loss = model.run_train(x=x, labels=labels)
    grads = dict(zip(names, host(*(p.grad for p in parameters)), strict=True))
    return {"weights": weights, "grads": grads, "loss": None if loss is None else loss.item()}
