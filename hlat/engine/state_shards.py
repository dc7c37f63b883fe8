"""Tensors of an engine as canonical shards for the checkpoint store."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hlat.config.run import Config
from hlat.distributed.mesh_axis import MeshAxis
from hlat.distributed.parameter_shards import ParameterShard
from hlat.distributed.state_shard import StateShard
from hlat.engine import graph_extraction
from hlat.model.canonical_views import iter_row_views
from hlat.model.parameter_spec import ParameterSpec
from hlat.model.weight_initialization import CHUNK_SIZE, compute_initial_values


def iter_state_shards(
    state: Mapping[str, Tensor],
    shard: ParameterShard,
    specs: Mapping[str, ParameterSpec],
    is_main_replica: bool,
) -> Iterator[StateShard]:
    """Yield the canonical shards of a parameter's weights, state and number of updates.

    Args:
        state: Local tensors `weights` and, in training, those of the optimizer and `step`, a
            scalar.
        shard: Canonical rows and columns of the local tensors.
        specs: Parameter specs by canonical name.
        is_main_replica: True if this rank saves the shard's owned rows.
    """
    columns = () if shard.columns is None else (shard.columns,)
    for key in (key for key in state if key != "step"):
        for rows, view, start in iter_row_views(shard.rows, state[key]):
            offset = (rows.start, *(first for first, _ in columns))
            size = (rows.num_rows, *(count for _, count in columns))
            saves = is_main_replica and start < shard.num_owned_rows
            shape = specs[rows.name].shape
            yield StateShard(f"{key}/{rows.name}", shape, offset, size, view, saves)
            if "step" in state and key == "weights":
                saves = saves and not any(offset)
                yield StateShard(f"updates/{rows.name}", (), (), (), state["step"], saves)


@torch.no_grad()
def init_weights(
    shards: Iterable[StateShard], specs: Mapping[str, ParameterSpec], config: Config, tp: MeshAxis
) -> None:
    """Fill the shards of weights with their initial values; all ranks along `tp` call it.

    While graphs are extracted, values do not matter, and are zeros.
    """
    for shard in shards:
        key, _, name = shard.name.partition("/")
        if key != "weights":
            continue
        if graph_extraction.is_extracting_graphs():
            shard.tensor.zero_()
            continue
        spec = specs[name]

        def sample(
            offset: tuple[int, ...], size: tuple[int, ...], spec: ParameterSpec = spec
        ) -> Tensor:
            seed = config.run.resolved_init_seed
            values = compute_initial_values(spec, config.model, seed, offset, size)
            return torch.from_numpy(values)

        if shard.size[1:] != shard.shape[1:]:
            _init_columns(shard, sample, tp)
        else:
            shard.tensor.copy_(sample(shard.offset, shard.size).view(shard.tensor.shape))


@torch.no_grad()
def copy_weights(shards: Iterable[StateShard], names: Collection[str]) -> None:
    """Set tensors of the state to the weights.

    Args:
        shards: Shards of an engine, for each parameter first those of the weights.
        names: Names of the tensors, `<key>/<parameter>`.
    """
    weights = dict[tuple[str, tuple[int, ...]], Tensor]()
    for shard in shards:
        key, _, name = shard.name.partition("/")
        if key == "weights":
            weights[name, shard.offset] = shard.tensor
        elif shard.name in names:
            shard.tensor.copy_(weights[name, shard.offset])


def _init_columns(
    shard: StateShard, sample: Callable[[tuple[int, ...], tuple[int, ...]], Tensor], tp: MeshAxis
) -> None:
    """Fill a shard of columns; the ranks along `tp` have all columns of the same rows.

    A random stream fills rows, so that a rank which samples its columns samples all others as well.
    Each rank therefore samples some of the rows, and the ranks exchange the columns.
    """
    (first_row, first_column), (num_rows, width) = shard.offset, shard.size
    blocks = tp.all_gather(torch.tensor(first_column // width)).tolist()
    num_sampled = min(-(-num_rows // tp.size), max(1, CHUNK_SIZE // shard.shape[1]))
    target = shard.tensor.view(num_rows, width)
    for start in range(0, num_rows, num_sampled * tp.size):
        first = min(start + tp.rank * num_sampled, num_rows)
        count = min(num_sampled, num_rows - first)
        rows = torch.zeros(num_sampled, shard.shape[1])
        rows[:count] = sample((first_row + first, 0), (count, shard.shape[1]))
        by_rank = rows.view(num_sampled, tp.size, width)[:, blocks].transpose(0, 1)
        received = tp.all_to_all(by_rank.contiguous()).view(-1, width)
        target[start : start + len(received)].copy_(received[: num_rows - start])
