"""Parameters of a rank with NxD's optimizer, their state and norms.

With ZeRO-1 NxD's optimizer updates equally many rows of each parameter on every data-parallel rank,
in fp32, with padding rows at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state
from torch import Tensor

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.distributed.parameter_shards import ParameterShard, compute_shard, count_kv_replicas
from hlat.engine.nxd.xla_optimizer import XlaOptimizer
from hlat.model.decoder_spec import list_module_parameters

_QKV_PARTS = {"weight_q": 0, "weight_k": 1, "weight_v": 2}
"""Row range of the fused q/k/v in each parameter of NxD's layer for shared heads."""


@dataclass(frozen=True)
class NxdParameter:
    """A parameter of this rank and the rows that its optimizer updates.

    Attributes:
        optimizer_param: The parameter, or rows of it in fp32.
        shard: Canonical rows and columns of `optimizer_param`.
        num_replicas: Number of tensor-parallel ranks with the same values.
    """

    param: Tensor
    optimizer_param: Tensor
    shard: ParameterShard
    num_replicas: int


def compute_param_shards(
    config: Config, named_params: Mapping[str, Tensor]
) -> dict[str, tuple[ParameterShard, int]]:
    """Return the shard and the number of tensor-parallel replicas of each parameter."""
    parameters = {param.name: param for param in list_module_parameters(config.model)}
    tp, rank = config.parallelism.tp, parallel_state.get_tensor_model_parallel_rank()
    num_kv_replicas = count_kv_replicas(config.model, tp)
    consecutive = num_kv_replicas == 1 or _has_adjacent_kv_ranks()
    shards = {}
    for name, param in named_params.items():
        path, _, leaf = name.rpartition(".")
        shard = compute_shard(parameters[f"{path}.weight"], tp, rank, consecutive)
        if leaf in _QKV_PARTS:
            start = sum(rows.num_rows for rows in shard.rows[: _QKV_PARTS[leaf]])
            shard = shard.slice_rows(start, start + len(param))
            shards[name] = (shard, 1 if leaf == "weight_q" else num_kv_replicas)
        else:
            shards[name] = (shard, tp if param.dim() == 1 else 1)
    return shards


def _has_adjacent_kv_ranks() -> bool:
    """Return True if consecutive ranks share a key/value head, as on trn2 and not on trn1.

    Raises:
        ConfigError: Ranks that share a head belong to different model replicas.
    """
    rank = dist.get_rank()
    kv_ranks, tp_ranks = (
        next(sorted(group) for group in groups if rank in group)
        for groups in (
            parallel_state.get_kv_shared_replica_groups(),
            parallel_state.get_tensor_model_parallel_replica_groups(),
        )
    )
    if not set(kv_ranks) <= set(tp_ranks):
        raise ConfigError(
            f"parallelism.tp={len(tp_ranks)}: NxD shares heads over ranks {kv_ranks}, and the "
            f"tensor-parallel ranks on this hardware are {tp_ranks}; use another parallelism.tp"
        )
    return tp_ranks.index(kv_ranks[1]) - tp_ranks.index(kv_ranks[0]) == 1


class NxdParameters:
    """Parameters by name with NxD's optimizer, in its order, and their norms in a dtype.

    NxD's optimizer is around XlaOptimizer, with ZeRO-1 around torch_xla's in between.
    """

    def __init__(
        self,
        named_params: Mapping[str, Tensor],
        param_shards: Mapping[str, tuple[ParameterShard, int]],
        nxd_optimizer: Any,
        zero: bool,
        dtype: torch.dtype,
    ) -> None:
        self.optimizer = nxd_optimizer
        inner = nxd_optimizer.optimizer
        self.base_optimizer: XlaOptimizer = inner.base_optimizer if zero else inner
        params = [p for group in nxd_optimizer.param_groups for p in group["params"]]
        groups = self.base_optimizer.param_groups
        optimizer_params = [p for group in groups for p in group["params"]]
        names = {id(param): name for name, param in named_params.items()}
        dp_rank = parallel_state.get_data_parallel_rank() if zero else 0
        self.local_params = {}
        for param, updated in zip(params, optimizer_params, strict=True):
            name = names[id(param)]
            shard, num_replicas = param_shards[name]
            rows = shard.slice_rows(dp_rank * len(updated), (dp_rank + 1) * len(updated))
            self.local_params[name] = NxdParameter(param, updated, rows, num_replicas)
        self._zero, self._dtype = zero, dtype
        self._replica_groups = _build_replica_groups(
            {param.num_replicas for param in self.local_params.values()}
        )
        # Tensors of one dimension, because a number would be a constant of this rank's graph
        device, rank = optimizer_params[0].device, dist.get_rank()
        self._is_first_replica = {
            count: torch.tensor([float(dist.get_group_rank(group, rank) == 0)]).to(device)
            for count, group in self._replica_groups.items()
        }

    def collect_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the optimizer; with ZeRO-1 this rank's rows of the sum."""
        gradients = {name: p.optimizer_param.grad for name, p in self.local_params.items()}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def compute_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the l2 norm over all ranks of tensors by parameter, counting replicas once."""
        square = torch.stack(
            [
                tensor.to(self._dtype).square().sum() / self.local_params[name].num_replicas
                for name, tensor in tensors.items()
            ]
        ).sum()
        dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
        dist.all_reduce(square, group=parallel_state.get_pipeline_model_parallel_group())
        if self._zero:
            dist.all_reduce(square, group=parallel_state.get_data_parallel_group())
        return square.sqrt()

    def get_state(self, name: str) -> dict[str, Tensor]:
        """Return weights, optimizer state and step of a parameter by key."""
        updated = self.local_params[name].optimizer_param
        return {"weights": updated.detach(), **self.base_optimizer.state[updated]}

    def sync_model_params(self) -> None:
        """Gather the weights of the model after those of the optimizer have changed."""
        if not self._zero:
            return
        for param in self.local_params.values():  # NxD requires gradients to gather
            param.param.grad = torch.zeros_like(param.param)
        self.optimizer.optimizer.allgather_weights_and_update_full_parameter()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def broadcast_replicas(self) -> None:
        """Copy weights and state of the first tensor-parallel rank to all replicas.

        Hardware stochastic rounding differs between replicas. All ranks all-reduce the first
        replica and zeros, so that all have the same graph.
        """
        for count, group in self._replica_groups.items():
            tensors = [
                tensor
                for name, param in self.local_params.items()
                if param.num_replicas == count
                for tensor in self._get_rounded_tensors(name, param)
            ]
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                same_dtype = [tensor for tensor in tensors if tensor.dtype is dtype]
                flat = torch.cat([tensor.flatten() for tensor in same_dtype])
                flat *= self._is_first_replica[count]
                dist.all_reduce(flat, group=group)
                parts = flat.split([tensor.numel() for tensor in same_dtype])  # type: ignore[no-untyped-call]
                for tensor, part in zip(same_dtype, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _get_rounded_tensors(self, name: str, param: NxdParameter) -> list[Tensor]:
        state = [tensor for key, tensor in self.get_state(name).items() if key != "step"]
        return [param.param.detach(), *state] if self._zero else state


def _build_replica_groups(replica_counts: set[int]) -> dict[int, Any]:
    """Return the groups of tensor-parallel ranks with the same values by number of ranks."""
    tp = parallel_state.get_tensor_model_parallel_size()
    return {
        count: parallel_state.get_tensor_model_parallel_group()
        if count == tp
        else parallel_state.get_kv_shared_group()
        for count in replica_counts - {1}
    }
