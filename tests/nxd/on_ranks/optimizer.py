"""Steps of NxD's optimizers, and what each rank then holds."""

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
    """Train parameters whose gradients are given, of each step, rank, micro batch and parameter.

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


def _shards(optimizer: Any) -> list[dict[str, Any]]:
    """Of each parameter, what this rank keeps of it."""
    base = optimizer.base_optimizer
    return [
        {
            "master": host(shard)[0],
            "main_grad": tuple(shard.main_grad.shape) if hasattr(shard, "main_grad") else None,
            **{k: host(v)[0] for k, v in base.state[shard].items() if isinstance(v, Tensor)},
        }
        for shard in base.param_groups[0]["params"]
    ]
