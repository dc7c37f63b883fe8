"""The weights of a rank as NxD keeps them: what each holds, its state, and what norms count.

Under ZeRO-1 NxD's optimizer updates a part of each parameter, equally many rows of it for every
data-parallel rank, in fp32; rows beyond the parameter's end are padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state
from torch import Tensor

from hlat.config.errors import ConfigError
from hlat.config.run import Config
from hlat.engine.shards import Shard, kv_copies, shard

MOMENTS = ("exp_avg", "exp_avg_sq")
_PARTS = {"weight_q": 0, "weight_k": 1, "weight_v": 2}
"""Which rows of the coalesced q/k/v NxD's layer for shared heads keeps in a parameter."""


@dataclass(frozen=True)
class Weight:
    """A parameter of this rank, and the part of it that its optimizer updates.

    Attributes:
        parameter: What the model reads.
        updated: What the optimizer updates: the parameter, or rows of it in fp32.
        shard: What `updated` holds.
        copies: Tensor-parallel ranks that hold the same.
    """

    parameter: Tensor
    updated: Tensor
    shard: Shard
    copies: int


def hold(
    config: Config, named: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Shard, int]]:
    """What each parameter holds, and on how many tensor-parallel ranks, by its name in the model.

    Args:
        config: Layout and shape of the model.
        named: The parameters of this rank.
        shapes: Of the whole parameters of llama.Llama.
    """
    tp, rank = config.parallelism.tp, parallel_state.get_tensor_model_parallel_rank()
    copies = kv_copies(config.model, tp)
    consecutive = copies == 1 or _share_with_the_next()
    found = {}
    for name, parameter in named.items():
        path, _, leaf = name.rpartition(".")
        whole = f"{path}.weight"
        held = shard(config.model, whole, shapes[whole], tp, rank, consecutive)
        if leaf in _PARTS:
            begin = sum(rows.count for rows in held.rows[: _PARTS[leaf]])
            held = held.cut(begin, begin + len(parameter))
            found[name] = (held, 1 if leaf == "weight_q" else copies)
        else:
            found[name] = (held, tp if parameter.dim() == 1 else 1)
    return found


def _share_with_the_next() -> bool:
    """Whether NxD lets consecutive ranks share a key/value head, as on trn2; trn1's are apart.

    Raises:
        ConfigError: Those that share one do not all belong to one replica of the model.
    """
    number = dist.get_rank()
    shared, ranks = (
        next(sorted(group) for group in groups if number in group)
        for groups in (
            parallel_state.get_kv_shared_replica_groups(),
            parallel_state.get_tensor_model_parallel_replica_groups(),
        )
    )
    if not set(shared) <= set(ranks):
        raise ConfigError(
            f"parallelism.tp={len(ranks)}: NxD shares heads over ranks {shared}, and the tensor-"
            f"parallel ranks on this hardware are {ranks}; use another parallelism.tp"
        )
    return ranks.index(shared[1]) - ranks.index(shared[0]) == 1


class Weights:
    """Weights by parameter name, with NxD's optimizer."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        held: Mapping[str, tuple[Shard, int]],
        nxd_optimizer: Any,
        zero: bool,
        dtype: torch.dtype,
    ) -> None:
        """Find what the optimizer keeps of each parameter.

        Args:
            named: The parameters, in the order in which the optimizer got them.
            held: What each holds, and on how many tensor-parallel ranks.
            nxd_optimizer: NxD's, around torch_xla's if there is ZeRO, around AdamW.
            zero: Whether there is.
            dtype: In which norms are computed.
        """
        self.optimizer = nxd_optimizer
        self.adamw = nxd_optimizer.optimizer.base_optimizer if zero else nxd_optimizer.optimizer
        given = [p for group in nxd_optimizer.param_groups for p in group["params"]]
        updated = [p for group in self.adamw.param_groups for p in group["params"]]
        names = {id(parameter): name for name, parameter in named.items()}
        dp = parallel_state.get_data_parallel_rank() if zero else 0
        self.held = {}
        for parameter, part in zip(given, updated, strict=True):
            name = names[id(parameter)]
            whole, copies = held[name]
            rows = whole.cut(dp * len(part), (dp + 1) * len(part))
            self.held[name] = Weight(parameter, part, rows, copies)
        self._zero, self._dtype = zero, dtype
        self._groups = _groups_of_copies({weight.copies for weight in self.held.values()})
        device = updated[0].device
        self._leads = {  # not a number, which would be a constant of a graph of this rank's own
            copies: torch.tensor(float(dist.get_group_rank(group, dist.get_rank()) == 0)).to(device)
            for copies, group in self._groups.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """What the optimizer is about to update by; under ZeRO-1 this rank's rows of the sum."""
        found = {name: weight.updated.grad for name, weight in self.held.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """l2 norm over all ranks of tensors like what is updated, each element counted once."""
        square = torch.stack(
            [
                tensor.to(self._dtype).square().sum() / self.held[name].copies
                for name, tensor in tensors.items()
            ]
        ).sum()
        dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
        dist.all_reduce(square, group=parallel_state.get_pipeline_model_parallel_group())
        if self._zero:
            dist.all_reduce(square, group=parallel_state.get_data_parallel_group())
        return square.sqrt()

    def state(self, name: str) -> dict[str, Tensor]:
        """What is kept of a parameter, by kind: weights, both moments, and step."""
        updated = self.held[name].updated
        return {"weights": updated.detach(), **self.adamw.state[updated]}

    @torch.no_grad()
    def equalise(self) -> None:
        """Give every copy of a weight and its moments the bits of the first tensor-parallel rank's.

        Hardware that rounds stochastically rounds each copy otherwise. All ranks add up the first
        one's and zeros, so that all have the same graph.
        """
        for copies, group in self._groups.items():
            tensors = [
                tensor
                for name, weight in self.held.items()
                if weight.copies == copies
                for tensor in self._rounded(name, weight)
            ]
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                some = [tensor for tensor in tensors if tensor.dtype is dtype]
                every = torch.cat([tensor.flatten() for tensor in some])
                every *= self._leads[copies]
                dist.all_reduce(every, group=group)
                sizes = [tensor.numel() for tensor in some]
                for tensor, one in zip(some, every.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                    tensor.copy_(one.view(tensor.shape))

    def _rounded(self, name: str, weight: Weight) -> list[Tensor]:
        kept = [tensor for kind, tensor in self.state(name).items() if kind != "step"]
        return [weight.parameter.detach(), *kept] if self._zero else kept


def _groups_of_copies(counts: set[int]) -> dict[int, Any]:
    """Groups of tensor-parallel ranks that hold the same, by how many those are."""
    tp = parallel_state.get_tensor_model_parallel_size()
    return {
        count: parallel_state.get_tensor_model_parallel_group()
        if count == tp
        else parallel_state.get_kv_shared_group()
        for count in counts - {1}
    }
