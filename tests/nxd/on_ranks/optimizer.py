"""Steps of NxD's optimizers, and the state of each rank after them."""

from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from neuronx_distributed.utils import get_device
from torch import Tensor, nn

from tests.nxd.on_ranks.start import host


def steps(
    values: list[Tensor],
    gradients: list[list[list[list[Tensor]]]],
    configuration: dict[str, Any],
    name: str,
    defaults: dict[str, Any],
    marks: dict[str, Any],
) -> dict[str, Any]:
    """Train with the given gradients of each step, rank, micro batch and parameter.

    Every parameter has the attributes of `marks`.
    """
    dist.init_process_group("xla", init_method="xla://")
    config = nxd.neuronx_distributed_config(**configuration)
    parameters = [nn.Parameter(value.to(get_device())) for value in values]
    for parameter in parameters:
        vars(parameter).update(marks)
    optimizer = nxd.initialize_parallel_optimizer(
        config, getattr(torch.optim, name), parameters, **defaults
    )
    norms = []
    for step in gradients:
        for micro_batch in step[dist.get_rank()]:
            torch.autograd.backward(parameters, [g.to(get_device()) for g in micro_batch])
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
        xm.mark_step()
    zero = config["optimizer_config"]["zero_one_enabled"]
    return {
        "weights": host(*parameters),
        "norms": [None if norm is None else norm.item() for norm in norms],
        "shards": _shards(optimizer.optimizer) if zero else None,
        "keys": sorted(optimizer.state_dict()),
    }


def restored(
    values: list[Tensor],
    others: list[Tensor],
    gradients: list[list[Tensor]],
    configuration: dict[str, Any],
    defaults: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Train with AdamW, load the shards into another optimizer, train the last step with it.

    The other optimizer starts with other weights and a learning rate of zero. Return its weights.
    """
    dist.init_process_group("xla", init_method="xla://")
    config = nxd.neuronx_distributed_config(**configuration)

    def begin(weights: list[Tensor], lr: float) -> tuple[list[nn.Parameter], Any]:
        parameters = [nn.Parameter(weight.to(get_device())) for weight in weights]
        settings = {**defaults, "lr": lr}
        return parameters, nxd.initialize_parallel_optimizer(
            config, torch.optim.AdamW, parameters, **settings
        )

    def train(parameters: list[nn.Parameter], optimizer: Any, step: list[Tensor]) -> None:
        torch.autograd.backward(parameters, [gradient.to(get_device()) for gradient in step])
        optimizer.step()
        optimizer.zero_grad()
        xm.mark_step()

    *before, last = gradients
    parameters, optimizer = begin(values, defaults["lr"])
    for step in before:
        train(parameters, optimizer, step)
    saved = _shards(optimizer.optimizer)
    parameters, optimizer = begin(others, 0.0)
    base = optimizer.optimizer.base_optimizer
    for shard, state in zip(base.param_groups[0]["params"], saved, strict=True):
        shard.data.copy_(state["master"])
        moments = {name: state[name].to(get_device()) for name in ("exp_avg", "exp_avg_sq")}
        base.state[shard] = {"step": state["step"], **moments}
    optimizer.param_groups[0]["lr"] = defaults["lr"]
    train(parameters, optimizer, last)
    return host(*parameters)


def _shards(optimizer: Any) -> list[dict[str, Any]]:
    """Return the shard of each parameter on this rank."""
    base = optimizer.base_optimizer
    return [
        {
            "master": host(shard)[0],
            "main_grad": tuple(shard.main_grad.shape) if hasattr(shard, "main_grad") else None,
            **{k: host(v)[0] for k, v in base.state[shard].items() if isinstance(v, Tensor)},
        }
        for shard in base.param_groups[0]["params"]
    ]
