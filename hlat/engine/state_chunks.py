"""Tensors of an engine as canonical chunks for the checkpoint store."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hlat.checkpoint.tensor_chunk import TensorChunk
from hlat.config.run import Config
from hlat.engine import graph_extraction
from hlat.engine.mesh_axis import MeshAxis
from hlat.engine.parameter_shards import ParameterShard
from hlat.model.canonical_views import iter_row_views
from hlat.model.parameter_spec import ParameterSpec
from hlat.model.weight_initialization import CHUNK_SIZE, compute_initial_values
from hlat.optim.adamw import MOMENTS


def iter_chunks(
    state: Mapping[str, Tensor],
    shard: ParameterShard,
    specs: Mapping[str, ParameterSpec],
    is_main_replica: bool,
) -> Iterator[TensorChunk]:
    """Yield the canonical chunks of a parameter's weights, moments and number of updates.

    Args:
        state: Local tensors `weights` and, in training, moments and `step`, a scalar.
        shard: Canonical rows and columns of the local tensors.
        specs: Parameter specs by canonical name.
        is_main_replica: True if this rank saves the shard's owned rows.
    """
    columns = () if shard.columns is None else (shard.columns,)
    for key in ("weights", *MOMENTS) if "step" in state else ("weights",):
        for rows, view, start in iter_row_views(shard.rows, state[key]):
            offset = (rows.start, *(first for first, _ in columns))
            size = (rows.num_rows, *(count for _, count in columns))
            saves = is_main_replica and start < shard.num_owned_rows
            shape = specs[rows.name].shape
            yield TensorChunk(f"{key}/{rows.name}", shape, offset, size, view, saves)
            if "step" in state and key == "weights":
                saves = saves and not any(offset)
                yield TensorChunk(f"updates/{rows.name}", (), (), (), state["step"], saves)


@torch.no_grad()
def init_weights(
    chunks: Iterable[TensorChunk],
    specs: Mapping[str, ParameterSpec],
    config: Config,
    tp: MeshAxis,
) -> None:
    """Fill the chunks of weights with their initial values; all ranks along `tp` call it.

    While graphs are extracted, values do not matter, and are zeros.
    """
    for chunk in chunks:
        key, _, name = chunk.name.partition("/")
        if key != "weights":
            continue
        if graph_extraction.is_extracting_graphs():
            chunk.tensor.zero_()
            continue
        spec = specs[name]

        def sample(
            offset: tuple[int, ...], size: tuple[int, ...], spec: ParameterSpec = spec
        ) -> Tensor:
            values = compute_initial_values(spec, config.model, config.run.seed, offset, size)
            return torch.from_numpy(values)

        if chunk.size[1:] != chunk.shape[1:]:
            _init_columns(chunk, sample, tp)
        else:
            chunk.tensor.copy_(sample(chunk.offset, chunk.size).view(chunk.tensor.shape))


def _init_columns(
    chunk: TensorChunk,
    sample: Callable[[tuple[int, ...], tuple[int, ...]], Tensor],
    tp: MeshAxis,
) -> None:
    """Fill a chunk of columns; the ranks along `tp` have all columns of the same rows.

    A random stream fills rows, so that a rank which samples its columns samples all others as well.
    Each rank therefore samples some of the rows, and the ranks exchange the columns.
    """
    (first_row, first_column), (num_rows, width) = chunk.offset, chunk.size
    blocks = tp.all_gather(torch.tensor(first_column // width)).tolist()
    num_sampled = min(-(-num_rows // tp.size), max(1, CHUNK_SIZE // chunk.shape[1]))
    target = chunk.tensor.view(num_rows, width)
    for start in range(0, num_rows, num_sampled * tp.size):
        first = min(start + tp.rank * num_sampled, num_rows)
        count = min(num_sampled, num_rows - first)
        rows = torch.zeros(num_sampled, chunk.shape[1])
        rows[:count] = sample((first_row + first, 0), (count, chunk.shape[1]))
        by_rank = rows.view(num_sampled, tp.size, width)[:, blocks].transpose(0, 1)
        received = tp.all_to_all(by_rank.contiguous()).view(-1, width)
        target[start : start + len(received)].copy_(received[: num_rows - start])
