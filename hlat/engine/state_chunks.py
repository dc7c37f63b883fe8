"""Tensors of an engine as canonical chunks for the checkpoint store."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hlat.checkpoint.tensor_chunk import TensorChunk
from hlat.config.run import Config
from hlat.engine.parameter_shards import ParameterShard
from hlat.model.canonical_views import iter_row_views
from hlat.model.parameter_specs import ParameterSpec
from hlat.model.weight_initialization import compute_initial_values

MOMENTS = ("exp_avg", "exp_avg_sq")


def iter_chunks(
    key: str,
    tensor: Tensor,
    shard: ParameterShard,
    specs: Mapping[str, ParameterSpec],
    is_main_replica: bool,
) -> Iterator[TensorChunk]:
    """Yield the canonical chunks of a weight or a moment.

    Args:
        key: Kind of the tensor, such as `weights`.
        tensor: Local tensor.
        shard: Canonical rows and columns of the tensor.
        specs: Parameter specs by canonical name.
        is_main_replica: True if this rank saves the shard's owned rows.
    """
    columns = () if shard.columns is None else (shard.columns,)
    for rows, view, start in iter_row_views(shard.rows, tensor):
        offset = (rows.start, *(first for first, _ in columns))
        size = (rows.num_rows, *(count for _, count in columns))
        saves = is_main_replica and start < shard.num_owned_rows
        yield TensorChunk(f"{key}/{rows.name}", specs[rows.name].shape, offset, size, view, saves)


def iter_step_chunks(weight_chunks: Iterable[TensorChunk], step: Tensor) -> Iterator[TensorChunk]:
    """Yield the number of updates, a scalar per canonical parameter of the chunks."""
    for chunk in weight_chunks:
        name = "updates/" + chunk.name.partition("/")[2]
        is_main_replica = chunk.is_main_replica and not any(chunk.offset)
        yield TensorChunk(name, (), (), (), step, is_main_replica)


@torch.no_grad()
def init_weights(
    chunks: Iterable[TensorChunk], specs: Mapping[str, ParameterSpec], config: Config
) -> None:
    """Fill chunks of weights with their initial values."""
    for chunk in chunks:
        spec = specs[chunk.name.removeprefix("weights/")]
        values = compute_initial_values(
            spec, config.model, config.run.seed, chunk.offset, chunk.size
        )
        chunk.tensor.copy_(torch.from_numpy(values).view(chunk.tensor.shape))
