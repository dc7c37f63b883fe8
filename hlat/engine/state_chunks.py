"""Tensors of an engine as canonical chunks for the checkpoint store."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hlat.checkpoint.tensor_chunk import TensorChunk
from hlat.config.run import Config
from hlat.engine.parameter_shards import ParameterShard
from hlat.model.canonical_views import iter_row_views
from hlat.model.parameter_spec import ParameterSpec
from hlat.model.weight_initialization import compute_initial_values
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
    chunks: Iterable[TensorChunk], specs: Mapping[str, ParameterSpec], config: Config
) -> None:
    """Fill the chunks of weights with their initial values."""
    for chunk in chunks:
        key, _, name = chunk.name.partition("/")
        if key != "weights":
            continue
        spec = specs[name]
        values = compute_initial_values(
            spec, config.model, config.run.seed, chunk.offset, chunk.size
        )
        chunk.tensor.copy_(torch.from_numpy(values).view(chunk.tensor.shape))
