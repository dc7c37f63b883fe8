"""Model parts of a rank: the modules of its pipeline stages with the memory of its shards.

The full model exists on the meta device only; other ranks' shards are never allocated.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hlat.config.precision import Fp32Operator
from hlat.config.run import Config
from hlat.distributed.device_mesh import ParallelMesh
from hlat.distributed.parameter_shards import ParameterShard, compute_shard
from hlat.distributed.pipeline_stages import assign_layers_to_stages
from hlat.engine.native import fsdp
from hlat.engine.native.data_parallel import DataParallelSharding
from hlat.engine.native.sharded_parameters import LocalParameter
from hlat.engine.native.tensor_parallel import TensorParallelRegions, apply_tensor_parallel
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_module_parameters
from hlat.model.embedding_spec import EMBEDDING_NAME
from hlat.precision.torch_dtypes import TORCH_DTYPES


def build_model_parts(
    config: Config, mesh: ParallelMesh, regions: TensorParallelRegions, device: torch.device
) -> tuple[dict[int, Decoder], dict[str, LocalParameter]]:
    """Return this rank's model parts by stage and its uninitialized parameters by name."""
    layout = config.parallelism
    dp_sharding = DataParallelSharding(mesh.dp, layout.zero)
    layers = assign_layers_to_stages(config.model.num_layers, layout.pp * layout.stages_per_rank)
    parts: dict[int, Decoder] = {}
    params: dict[str, LocalParameter] = {}
    for stage in range(mesh.pp.rank, len(layers), layout.pp):
        with torch.device("meta"):
            part = Decoder(config.model, Fp32Operator.norm in config.precision.fp32_operators)
        _drop_other_stages(part, layers[stage], stage == 0, stage == len(layers) - 1)
        shards = _shard_parameters(part, config, mesh)
        if dp_sharding.is_fsdp:
            fsdp.apply_fsdp(part, config, mesh.dp, device)
            params |= _collect_fsdp_parameters(part, shards, dp_sharding)
        else:
            params |= _allocate_parameters(part, shards, config, dp_sharding, device)
        apply_tensor_parallel(part, config.model, regions)
        parts[stage] = part
    return parts, params


def _drop_other_stages(part: Decoder, layers: range, is_first: bool, is_last: bool) -> None:
    """Remove the modules of other stages."""
    for name in [*part.layers]:
        if int(name) not in layers:
            del part.layers[name]
    has_tied_head = is_last and part.lm_head is None
    if not (is_first or has_tied_head):
        part.embed_tokens = None
    if not is_last:
        part.norm = part.lm_head = None


def _shard_parameters(
    part: Decoder, config: Config, mesh: ParallelMesh
) -> dict[str, ParameterShard]:
    """Replace each meta parameter by this rank's tensor-parallel shard; return the shards."""
    precision = config.precision
    dtype = TORCH_DTYPES[precision.master_weight_dtype or precision.param_dtype]
    parameters = {param.name: param for param in list_module_parameters(config.model)}
    shards = {}
    for name, _ in [*part.named_parameters()]:
        shard = compute_shard(parameters[name], mesh.tp.size, mesh.tp.rank)
        if mesh.pp.rank > 0 and name == EMBEDDING_NAME:
            shard = replace(shard, num_owned_rows=0)  # the first stage owns a tied embedding
        shards[name] = shard
        _replace_parameter(part, name, torch.empty(shard.shape, dtype=dtype, device="meta"))
    return shards


def _allocate_parameters(
    part: Decoder,
    shards: Mapping[str, ParameterShard],
    config: Config,
    dp_sharding: DataParallelSharding,
    device: torch.device,
) -> dict[str, LocalParameter]:
    """Allocate parameters; matrices with the padding rows of ZeRO-1."""
    dtype = TORCH_DTYPES[config.precision.param_dtype]
    params = {}
    for name, shard in shards.items():
        num_rows = shard.shape[0]
        padded = num_rows if len(shard.shape) == 1 else dp_sharding.compute_padded_rows(num_rows)
        data = torch.empty((padded, *shard.shape[1:]), dtype=dtype, device=device)
        params[name] = LocalParameter(_replace_parameter(part, name, data[:num_rows]), data, shard)
    return params


def _collect_fsdp_parameters(
    part: Decoder, shards: Mapping[str, ParameterShard], dp_sharding: DataParallelSharding
) -> dict[str, LocalParameter]:
    """Return the local rows of parameters that FSDP2 sharded."""
    params = {}
    for name, param in part.named_parameters():
        data = fsdp.to_local(param.detach())
        rows = dp_sharding.get_shard_rows(shards[name].shape[0])
        assert rows.stop - rows.start == len(data)
        params[name] = LocalParameter(param, data, shards[name].slice_rows(rows.start, rows.stop))
    return params


def _replace_parameter(part: Decoder, name: str, tensor: Tensor) -> nn.Parameter:
    module, _, leaf = name.rpartition(".")
    param = nn.Parameter(tensor)
    setattr(part.get_submodule(module), leaf, param)
    return param
