"""The support itself: collectives as torch_xla documents them, and ranks that misbehave."""

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
    """Each collective of this rank's tensor, and the tensor afterwards."""
    rank = start()
    own = tensors[rank].to(get_device())
    in_place = own.clone()
    xm.all_reduce(xm.REDUCE_SUM, [in_place], scale=0.5, groups=groups)
    size = len(groups[0])
    found = {
        "sum": xm.all_reduce(xm.REDUCE_SUM, own, groups=groups),
        "largest": xm.all_reduce(xm.REDUCE_MAX, own),
        "half_sum_in_place": in_place,
        "gathered": xm.all_gather(own, dim=1, groups=groups),
        "scattered": xm.reduce_scatter(xm.REDUCE_SUM, own, 2.0, 1, size, groups=groups),
        "exchanged": xm.all_to_all(own, 1, 0, size, groups=groups),
        "from_the_rank_before": xm.collective_permute(own, [[0, 1], [1, 2], [2, 3]]),
        "afterwards": own,
    }
    return dict(zip(found, host(*found.values()), strict=True))


def reduced_input() -> Tensor:
    """What NxD's own reduce-scatter was given, afterwards."""
    given = torch.full((4, 2), float(start()), device=get_device())
    mappings.reduce_scatter_to_sequence_parallel_region(given)
    return host(given)[0]


def payloads(payload: bytes) -> list[bytes]:
    """What all ranks bring to a rendezvous, twice."""
    start()
    own = payload + str(dist.get_rank()).encode()
    return xm.rendezvous("first", own) + xm.rendezvous("second")


def environment() -> dict[str, Any]:
    """What a rank sees of its surroundings."""
    rank = start()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NXD_CPU_MODE")
    return {"rank": rank, "device": get_device().type, **{name: os.environ[name] for name in names}}


def kernel() -> None:
    """Call what only the Neuron SDK has."""
    xla_call(start)


def one_fails() -> None:
    """The second rank ends with an error while the others wait for it."""
    if start() == 1:
        print("the second rank speaks")
        raise ValueError("on purpose")
    time.sleep(600)


def one_hangs() -> None:
    """The first rank never answers."""
    if os.environ["RANK"] == "0":
        print("the first rank speaks", flush=True)
        time.sleep(600)


def works_for(seconds: float) -> bool:
    """Compute until so many seconds of the processor are used."""
    while time.process_time() < seconds:
        pass
    return True
