"""Model parts of a rank: the modules of its pipeline stages with the memory of its shards.

The full model exists on the meta device only; other ranks' shards are never allocated.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hlat.config.model import ModelConfig
from hlat.config.precision import Fp32Operator
from hlat.config.run import Config
from hlat.distributed.device_mesh import ParallelMesh
from hlat.distributed.parameter_shards import ParameterShard, compute_shard
from hlat.distributed.pipeline_stages import assign_layers_to_stages
from hlat.distributed.state_shard import BUFFERS, StateShard
from hlat.engine.native import fsdp
from hlat.engine.native.data_parallel import DataParallelSharding
from hlat.engine.native.expert_parallel import apply_expert_parallel, drop_other_experts
from hlat.engine.native.sharded_parameters import LocalParameter
from hlat.engine.native.tensor_parallel import TensorParallelRegions, apply_tensor_parallel
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_buffer_specs, list_module_parameters
from hlat.model.embedding_spec import EMBEDDING_NAME
from hlat.model.parameter_spec import ModuleParameter
from hlat.precision.torch_dtypes import TORCH_DTYPES


def build_model_parts(
    config: Config, mesh: ParallelMesh, regions: TensorParallelRegions, device: torch.device
) -> tuple[dict[int, Decoder], dict[str, LocalParameter]]:
    """Return this rank's model parts by stage and its uninitialized parameters by name."""
    layout = config.parallelism
    layers = assign_layers_to_stages(config.model.num_layers, layout.pp * layout.stages_per_rank)
    parts: dict[int, Decoder] = {}
    params: dict[str, LocalParameter] = {}
    for stage in range(mesh.pp.rank, len(layers), layout.pp):
        with torch.device("meta"):
            part = Decoder(config.model, Fp32Operator.norm in config.precision.fp32_operators)
        _drop_other_stages(part, layers[stage], stage == 0, stage == len(layers) - 1)
        parameters = {param.name: param for param in list_module_parameters(config.model)}
        drop_other_experts(part, parameters.values(), mesh.ep)
        shards = _shard_parameters(part, parameters, config, mesh)
        shardings = _select_shardings(part, parameters, mesh, layout.zero)
        unsharded = {name: s for name, s in shards.items() if not shardings[name].is_fsdp}
        if fsdp.uses_fsdp(config, mesh):
            for name in unsharded:
                module, _, leaf = name.rpartition(".")
                part.get_submodule(module).register_parameter(leaf, None)
            fsdp.apply_fsdp(part, config, mesh, device)
            params |= _collect_fsdp_parameters(part, shards, shardings)
        params |= _allocate_parameters(part, unsharded, config, shardings, device)
        apply_tensor_parallel(part, config.model, regions)
        apply_expert_parallel(part, mesh.ep)
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


def _select_shardings(
    part: Decoder, parameters: Mapping[str, ModuleParameter], mesh: ParallelMesh, zero: int
) -> dict[str, DataParallelSharding]:
    """Return the sharding of each parameter over the ranks that have the same one."""
    dense, of_experts = (
        DataParallelSharding(axis, mesh.dp_replicate, zero)
        for axis in (mesh.dp_shard, mesh.expert_dp_shard)
    )
    return {
        name: dense if parameters[name].expert is None else of_experts
        for name, _ in part.named_parameters()
    }


def _shard_parameters(
    part: Decoder, parameters: Mapping[str, ModuleParameter], config: Config, mesh: ParallelMesh
) -> dict[str, ParameterShard]:
    """Replace each meta parameter by this rank's tensor-parallel shard; return the shards."""
    precision = config.precision
    dtype = TORCH_DTYPES[precision.master_weight_dtype or precision.param_dtype]
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
    shardings: Mapping[str, DataParallelSharding],
    device: torch.device,
) -> dict[str, LocalParameter]:
    """Allocate parameters; matrices with the padding rows of ZeRO-1."""
    dtype = TORCH_DTYPES[config.precision.param_dtype]
    params = {}
    for name, shard in shards.items():
        num_rows, sharding = shard.shape[0], shardings[name]
        padded = num_rows if len(shard.shape) == 1 else sharding.compute_padded_rows(num_rows)
        data = torch.empty((padded, *shard.shape[1:]), dtype=dtype, device=device)
        param = _replace_parameter(part, name, data[:num_rows])
        params[name] = LocalParameter(param, data, shard, sharding)
    return params


def _collect_fsdp_parameters(
    part: Decoder,
    shards: Mapping[str, ParameterShard],
    shardings: Mapping[str, DataParallelSharding],
) -> dict[str, LocalParameter]:
    """Return the local rows of parameters that FSDP2 sharded."""
    params = {}
    for name, param in part.named_parameters():
        data = fsdp.to_local(param.detach())
        rows = shardings[name].get_shard_rows(shards[name].shape[0])
        assert rows.stop - rows.start == len(data)
        shard = shards[name].slice_rows(rows.start, rows.stop)
        params[name] = LocalParameter(param, data, shard, shardings[name])
    return params


def _replace_parameter(part: Decoder, name: str, tensor: Tensor) -> nn.Parameter:
    module, _, leaf = name.rpartition(".")
    param = nn.Parameter(tensor)
    setattr(part.get_submodule(module), leaf, param)
    return param


class ModelBuffers:
    """Buffers of the parts of this rank, the same on all its data- and tensor-parallel ranks.

    Buffers are state of modules that the optimizer does not train.
    """

    def __init__(
        self,
        parts: Iterable[Decoder],
        model: ModelConfig,
        mesh: ParallelMesh,
        device: torch.device,
    ) -> None:
        """Allocate the buffers of the model parts with their initial values."""
        self._specs = {spec.name: spec for spec in list_buffer_specs(model)}
        self._saves = mesh.dp.rank == mesh.tp.rank == 0
        self._buffers: dict[str, Tensor] = {}
        for part in parts:
            for name, buffer in [*part.named_buffers()]:
                module, _, leaf = name.rpartition(".")
                tensor = torch.empty_like(buffer, device=device)
                setattr(part.get_submodule(module), leaf, tensor)
                self._buffers[f"model.{name}"] = tensor
        self.reset()

    def reset(self) -> None:
        """Set all buffers to their initial values."""
        for name, buffer in self._buffers.items():
            buffer.fill_(self._specs[name].initial_value)

    def iter_state_shards(self) -> Iterator[StateShard]:
        """Yield the buffers; one rank of each pipeline stage saves them."""
        for name, buffer in self._buffers.items():
            shape = self._specs[name].shape
            offset = (0,) * len(shape)
            yield StateShard(f"{BUFFERS}/{name}", shape, offset, shape, buffer, self._saves)
