"""ZeRO stages 2 and 3 through torch's FSDP2.

Each data-parallel rank stores some rows of every parameter. FSDP2 all-gathers the parameters of a
layer before its forward pass and reduce-scatters their gradients after its backward pass; stage 3
also reshards a layer between the two. The rest of the engine sees parameters of fewer rows.

FSDP2 and DTensor are imported when they are used, since this takes half the time of torch's import.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hlat.config.run import Config
from hlat.distributed.device_mesh import ParallelMesh
from hlat.model.decoder import Decoder
from hlat.model.experts import Experts
from hlat.precision.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def uses_fsdp(config: Config, mesh: ParallelMesh) -> bool:
    """Return True if FSDP2 shards the parameters."""
    return config.parallelism.zero > 1 and mesh.dp_shard.size > 1


def apply_fsdp(part: Decoder, config: Config, mesh: ParallelMesh, device: torch.device) -> None:
    """Shard the parameters of a model part on the meta device over the ranks of a replica.

    This replaces the parameters by uninitialized rows on the device. Experts are sharded over the
    ranks with the same experts. FSDP2 does not sum gradients over replicas; data_parallel.py does,
    once per step.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = config.precision
    policy = MixedPrecisionPolicy(
        TORCH_DTYPES[precision.param_dtype],
        TORCH_DTYPES[precision.reduce_dtype],
        cast_forward_inputs=False,
    )
    is_zero3 = config.parallelism.zero > 2
    shard = partial(fully_shard, mp_policy=policy)
    dense_mesh, expert_mesh = (
        None if axis.group is None else DeviceMesh.from_group(axis.group, device.type)
        for axis in (mesh.dp_shard, mesh.expert_dp_shard)
    )
    for layer in part.layers.values():
        if expert_mesh is not None:
            for experts in (one for one in layer.modules() if isinstance(one, Experts)):
                shard(experts, mesh=expert_mesh, reshard_after_forward=is_zero3)
        shard(layer, mesh=dense_mesh, reshard_after_forward=is_zero3)
    # The loss reads the head after the forward pass of the part
    shard(part, mesh=dense_mesh, reshard_after_forward=False)
    for module in _find_fsdp_modules(part):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    part.to_empty(device=device)


def reshard(parts: Iterable[Decoder]) -> None:
    """Free the parameters that an evaluation gathered; a backward pass does this by itself."""
    for part in parts:
        for module in _find_fsdp_modules(part):
            module.reshard()


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a DTensor; other tensors unchanged."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _find_fsdp_modules(part: nn.Module) -> "list[FSDPModule]":
    from torch.distributed.fsdp import FSDPModule

    return [module for module in part.modules() if isinstance(module, FSDPModule)]
