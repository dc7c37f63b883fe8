"""ZeRO stages 2 and 3: torch's FSDP2 shards what lives between forward and backward passes.

Each data-parallel rank keeps some rows of every parameter. FSDP2 joins them where a layer needs
them, and adds up and cuts each gradient when a layer has gone back; stage 3 also lets go of a
layer's weights between its two passes. To everything else a rank has a parameter of fewer rows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hlat.config.run import Config
from hlat.engine.axis import Axis
from hlat.engine.dtypes import DTYPES
from hlat.model.llama import Llama


def share(part: Llama, config: Config, axis: Axis, device: torch.device) -> None:
    """Let data-parallel ranks hold each parameter of a part together.

    Args:
        part: Parameters on the meta device; each becomes this rank's rows, whatever memory holds.
        config: Recipe and layout; the rules have accepted them.
        axis: The data-parallel ranks, at least two.
        device: Where the rows are to be.
    """
    assert axis.group is not None
    precision = config.precision
    mesh = DeviceMesh.from_group(axis.group, device.type)
    policy = MixedPrecisionPolicy(
        DTYPES[precision.weights], DTYPES[precision.reduction], cast_forward_inputs=False
    )
    let_go = config.parallelism.zero > 2
    for layer in part.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=let_go)
    # The head is read by the loss, when the part's own pass is over
    fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in _shared(part):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    part.to_empty(device=device)


def release(parts: Iterable[Llama]) -> None:
    """Let go of what evaluation has joined; a backward pass does so by itself."""
    for part in parts:
        for module in _shared(part):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of what data-parallel ranks hold together."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shared(part: nn.Module) -> list[FSDPModule]:
    return [module for module in part.modules() if isinstance(module, FSDPModule)]
