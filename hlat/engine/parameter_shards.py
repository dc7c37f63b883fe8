"""Tensor-parallel shard of each parameter: the sharding plan applied to fused weights.

Both engines use the same shards, so that checkpoints are interchangeable.
"""

from dataclasses import dataclass

from hlat.config.model import ModelConfig
from hlat.model import fused_weights
from hlat.model.fused_weights import RowRange
from hlat.parallelism.sharding import ShardingRule, find_sharding_rule


@dataclass(frozen=True)
class ParameterShard:
    """A shard of a parameter of llama.Llama.

    Attributes:
        rows: Canonical rows of the shard, from its first row to its last.
        num_owned_rows: Leading rows that this rank saves and counts in norms; the rows after them
            are replicas of another rank's.
        columns: First canonical column and number of columns; None for a vector.
    """

    rows: tuple[RowRange, ...]
    num_owned_rows: int
    columns: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        num_rows = fused_weights.count_rows(self.rows)
        return (num_rows,) if self.columns is None else (num_rows, self.columns[1])

    def slice_rows(self, start: int, stop: int) -> "ParameterShard":
        """Return the rows from `start` to `stop`, or to the end of the shard."""
        num_owned_rows = min(max(self.num_owned_rows - start, 0), stop - start)
        rows = fused_weights.slice_row_ranges(self.rows, start, stop)
        return ParameterShard(rows, num_owned_rows, self.columns)


def compute_shard(
    model: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    tp: int,
    rank: int,
    consecutive: bool = True,
) -> ParameterShard:
    """Return the shard of a parameter of llama.Llama on one tensor-parallel rank.

    The vocabulary is split into equal shards without padding; the last may be shorter. With more
    ranks than key/value heads, heads are replicated: the ranks that share a head are consecutive,
    or else their distance is the number of heads. The degree is validated for the model.
    """
    rows = fused_weights.list_row_ranges(model, name, shape[0])
    columns = (0, shape[1]) if len(shape) == 2 else None
    rule = find_sharding_rule(rows[0].name)
    if rule is ShardingRule.replicated:
        return ParameterShard(rows, shape[0] if rank == 0 else 0, columns)
    if rule is ShardingRule.row:
        assert columns is not None
        width, index = shape[1] // tp, rank
        if name.endswith(".o_proj.weight"):  # its input is the output of this rank's query heads
            head, replica = find_kv_head(model, tp, rank, consecutive)
            index = head * count_kv_replicas(model, tp) + replica
        return ParameterShard(rows, shape[0], (index * width, width))
    if name.endswith(".qkv_proj.weight") and count_kv_replicas(model, tp) > 1:
        canonical = rows[0].name.replace("q_proj", "qkv_proj")
        kv_head = find_kv_head(model, tp, rank, consecutive)
        return _shard_replicated_kv_head(model, canonical, tp, kv_head, columns)
    step = -(-shape[0] // tp)
    rows = fused_weights.slice_row_ranges(rows, rank * step, (rank + 1) * step)
    return ParameterShard(rows, fused_weights.count_rows(rows), columns)


def count_kv_replicas(model: ModelConfig, tp: int) -> int:
    """Return the number of tensor-parallel ranks with the same key/value head, at least 1."""
    return max(1, tp // model.num_key_value_heads)


def find_kv_head(
    model: ModelConfig, tp: int, rank: int, consecutive: bool = True
) -> tuple[int, int]:
    """Return the key/value head (or group of heads) of a rank and the index of its replica."""
    num_replicas = count_kv_replicas(model, tp)
    if consecutive:
        return divmod(rank, num_replicas)
    replica, head = divmod(rank, tp // num_replicas)
    return head, replica


def _shard_replicated_kv_head(
    model: ModelConfig,
    name: str,
    tp: int,
    kv_head: tuple[int, int],
    columns: tuple[int, int] | None,
) -> ParameterShard:
    head, replica = kv_head
    num_queries = model.num_attention_heads // tp
    first_query = replica * num_queries
    rows = fused_weights.list_qkv_row_ranges(model, name, [head], num_queries, first_query)
    owned = rows if replica == 0 else rows[:1]
    return ParameterShard(rows, fused_weights.count_rows(owned), columns)
