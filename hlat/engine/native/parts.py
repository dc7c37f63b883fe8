"""This rank's part of the model: its stages' modules, with memory for its shards alone.

The whole model exists on the meta device only; what a rank does not hold is never made.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hlat.config.precision import Operator
from hlat.config.run import Config
from hlat.engine.dtypes import DTYPES
from hlat.engine.native import fully_sharded
from hlat.engine.native.mesh import Mesh
from hlat.engine.native.replicas import Replicas
from hlat.engine.native.tensor_parallel import Regions, parallelize
from hlat.engine.native.weights import Weight
from hlat.engine.shards import Shard, shard
from hlat.model.llama import Llama
from hlat.parallelism.plan import stage_layers


def make_parts(
    config: Config, mesh: Mesh, regions: Regions, device: torch.device
) -> tuple[dict[int, Llama], dict[str, Weight]]:
    """The parts of a rank by number of their stage, and all their weights by parameter name.

    Weights are whatever memory holds.
    """
    layout = config.parallelism
    replicas = Replicas(mesh.dp, layout.zero)
    layers = stage_layers(config.model.num_layers, layout.pp * layout.stages_per_rank)
    parts: dict[int, Llama] = {}
    weights: dict[str, Weight] = {}
    for number in range(mesh.pp.rank, len(layers), layout.pp):
        with torch.device("meta"):
            part = Llama(config.model, Operator.norm in config.precision.fp32_operators)
        _keep(part, layers[number], number == 0, number == len(layers) - 1)
        shards = _cut(part, config, mesh)
        if replicas.shared:
            fully_sharded.share(part, config, mesh.dp, device)
            weights |= _rows(part, shards, replicas)
        else:
            weights |= _allocate(part, shards, config, replicas, device)
        parallelize(part, config.model, regions)
        parts[number] = part
    return parts, weights


def _keep(part: Llama, layers: range, first: bool, last: bool) -> None:
    """Take away what other stages have; every pp-th stage is a rank's."""
    for name in [*part.layers]:
        if int(name) not in layers:
            del part.layers[name]
    if last and part.lm_head is None:
        return  # a tied head: the rules see to it that there is but one stage
    if not first:
        part.embed_tokens = None
    if not last:
        part.norm = part.lm_head = None


def _cut(part: Llama, config: Config, mesh: Mesh) -> dict[str, Shard]:
    """Let each parameter have the shape of this rank's shard, and tell what that is."""
    precision = config.precision
    dtype = DTYPES[precision.master_weights or precision.weights]
    shards = {}
    for name, whole in [*part.named_parameters()]:
        held = shard(config.model, name, tuple(whole.shape), mesh.tp.size, mesh.tp.rank)
        shards[name] = held
        _replace(part, name, torch.empty(held.shape, dtype=dtype, device="meta"))
    return shards


def _allocate(
    part: Llama,
    shards: Mapping[str, Shard],
    config: Config,
    replicas: Replicas,
    device: torch.device,
) -> dict[str, Weight]:
    """Give parameters memory, of matrices with the rows that ZeRO-1 needs beyond their own."""
    dtype = DTYPES[config.precision.weights]
    weights = {}
    for name, held in shards.items():
        rows = held.shape[0]
        padded = rows if len(held.shape) == 1 else replicas.padded(rows)
        memory = torch.empty((padded, *held.shape[1:]), dtype=dtype, device=device)
        weights[name] = Weight(_replace(part, name, memory[:rows]), memory, held)
    return weights


def _rows(part: Llama, shards: Mapping[str, Shard], replicas: Replicas) -> dict[str, Weight]:
    """What this rank holds of parameters that data-parallel ranks hold together."""
    weights = {}
    for name, computing in part.named_parameters():
        memory = fully_sharded.local(computing.detach())
        rows = replicas.share_of(shards[name].shape[0])
        assert rows.stop - rows.start == len(memory)
        weights[name] = Weight(computing, memory, shards[name].cut(rows.start, rows.stop))
    return weights


def _replace(part: Llama, name: str, tensor: Tensor) -> nn.Parameter:
    module, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(tensor)
    setattr(part.get_submodule(module), leaf, parameter)
    return parameter
