"""Functions that test tests/nxd/support: collectives of torch_xla, and ranks that fail or hang."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.utils import get_device
from torch import Tensor
from torch_neuronx.xla_impl.base import xla_call

from tests.nxd.on_ranks.start import host, start


def collectives(tensors: list[Tensor], groups: list[list[int]]) -> dict[str, Tensor]:
    """Return the result of each collective on this rank's tensor, and the tensor afterwards."""
    rank = start()
    local = tensors[rank].to(get_device())
    in_place = local.clone()
    xm.all_reduce(xm.REDUCE_SUM, [in_place], scale=0.5, groups=groups)
    size = len(groups[0])
    found = {
        "sum": xm.all_reduce(xm.REDUCE_SUM, local, groups=groups),
        "largest": xm.all_reduce(xm.REDUCE_MAX, local),
        "half_sum_in_place": in_place,
        "gathered": xm.all_gather(local, dim=1, groups=groups),
        "scattered": xm.reduce_scatter(xm.REDUCE_SUM, local, 2.0, 1, size, groups=groups),
        "exchanged": xm.all_to_all(local, 1, 0, size, groups=groups),
        "from_the_rank_before": xm.collective_permute(local, [[0, 1], [1, 2], [2, 3]]),
        "afterwards": local,
    }
    return dict(zip(found, host(*found.values()), strict=True))


def reduced_input() -> Tensor:
    """Return the input of NxD's reduce-scatter after the call."""
    given = torch.full((4, 2), float(start()), device=get_device())
    mappings.reduce_scatter_to_sequence_parallel_region(given)
    return host(given)[0]


def payloads(payload: bytes) -> list[bytes]:
    """Return the payloads of two rendezvous."""
    start()
    local = payload + str(dist.get_rank()).encode()
    return xm.rendezvous("first", local) + xm.rendezvous("second")


def environment() -> dict[str, Any]:
    """Return rank, device and environment variables."""
    rank = start()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NXD_CPU_MODE")
    return {"rank": rank, "device": get_device().type, **{name: os.environ[name] for name in names}}


def kernel() -> None:
    """Call a function that only the Neuron SDK has."""
    xla_call(start)


def one_fails() -> None:
    """Raise an error on the second rank while the others wait."""
    if start() == 1:
        print("the second rank speaks")
        raise ValueError("on purpose")
    time.sleep(600)


def one_hangs() -> None:
    """Block the first rank."""
    if os.environ["RANK"] == "0":
        print("the first rank speaks", flush=True)
        time.sleep(600)


def works_for(seconds: float) -> bool:
    """Use this much processor time."""
    while time.process_time() < seconds:
        pass
    return True
