"""Tensor-parallel shard of each parameter: its sharding rule applied to its rows.

Both engines use the same shards, so that checkpoints are interchangeable.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from hlat.config.model import ModelConfig
from hlat.model.parameter_spec import (
    ModuleParameter,
    ParameterRole,
    RowRange,
    ShardingRule,
)


@dataclass(frozen=True)
class ParameterShard:
    """A shard of a parameter of decoder.Decoder.

    Attributes:
        rows: Canonical rows of the shard, from its first row to its last.
        num_owned_rows: Leading rows that this rank saves and counts in norms; the rows after them
            are replicas of another rank's.
        columns: First canonical column and number of columns; None for a vector.
        sharding: Sharding rule, which determines the ranks that sum the gradient.
        role: Role in the model, which determines the optimizer's settings.
    """

    rows: tuple[RowRange, ...]
    num_owned_rows: int
    columns: tuple[int, int] | None
    sharding: ShardingRule
    role: ParameterRole

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        num_rows = count_rows(self.rows)
        return (num_rows,) if self.columns is None else (num_rows, self.columns[1])

    @property
    def num_unshared_rows(self) -> int:
        """Number of leading rows that no other tensor-parallel rank has; the others are shared."""
        return count_rows(row_range for row_range in self.rows if not row_range.is_shared)

    def slice_rows(self, start: int, stop: int) -> "ParameterShard":
        """Return the rows from `start` to `stop`, or to the end of the shard."""
        num_owned_rows = min(max(self.num_owned_rows - start, 0), stop - start)
        return replace(
            self, rows=slice_row_ranges(self.rows, start, stop), num_owned_rows=num_owned_rows
        )


def compute_shard(
    parameter: ModuleParameter, tp: int, rank: int, consecutive: bool = True
) -> ParameterShard:
    """Return the shard of a parameter on one tensor-parallel rank.

    The vocabulary is split into equal shards without padding; the last may be shorter. With more
    ranks than key/value heads, heads are replicated: the ranks that share a head are consecutive,
    or else their distance is the number of heads. The degree is validated for the model.
    """
    rule, shape = parameter.sharding, parameter.shape
    columns = (0, shape[1]) if len(shape) == 2 else None
    build = partial(ParameterShard, sharding=rule, role=parameter.specs[0].role)
    if rule.is_replicated:
        return build(parameter.rows, shape[0] if rank == 0 else 0, columns)
    if rule is ShardingRule.row:
        assert columns is not None
        num_replicas = max(1, tp // parameter.num_column_groups)
        group, replica = find_group(num_replicas, tp, rank, consecutive)
        index = group * num_replicas + replica
        width = shape[1] // tp
        return build(parameter.rows, shape[0], (index * width, width))
    if rule is ShardingRule.vocabulary:
        step = -(-shape[0] // tp)
        rows = slice_row_ranges(parameter.rows, rank * step, (rank + 1) * step)
        return build(rows, count_rows(rows), columns)
    num_replicas = max(1, tp // parameter.num_groups)
    group, replica = find_group(num_replicas, tp, rank, consecutive)
    if num_replicas > 1:
        rows = parameter.list_group_rows(group, num_replicas, replica)
        owned = rows if replica == 0 else [part for part in rows if not part.is_shared]
        return build(rows, count_rows(owned), columns)
    num_groups = parameter.num_groups // tp
    groups = range(rank * num_groups, (rank + 1) * num_groups)
    rows = tuple(part for group in groups for part in parameter.list_group_rows(group))
    return build(rows, count_rows(rows), columns)


def slice_row_ranges(row_ranges: Iterable[RowRange], start: int, stop: int) -> tuple[RowRange, ...]:
    """Return rows `start` to `stop`, counted over all ranges and clipped to them."""
    selected, offset = [], 0
    for row_range in row_ranges:
        first, last = max(start - offset, 0), min(stop - offset, row_range.num_rows)
        if first < last:
            selected.append(
                replace(row_range, start=row_range.start + first, num_rows=last - first)
            )
        offset += row_range.num_rows
    return tuple(selected)


def count_rows(row_ranges: Iterable[RowRange]) -> int:
    """Return the total number of rows."""
    return sum(row_range.num_rows for row_range in row_ranges)


def count_kv_replicas(model: ModelConfig, tp: int) -> int:
    """Return the number of tensor-parallel ranks with the same key/value head, at least 1."""
    return max(1, tp // model.num_key_value_heads)


def find_group(num_replicas: int, tp: int, rank: int, consecutive: bool = True) -> tuple[int, int]:
    """Return the key/value head (or group of heads) of a rank and the index of its replica."""
    if consecutive:
        return divmod(rank, num_replicas)
    replica, group = divmod(rank, tp // num_replicas)
    return group, replica
