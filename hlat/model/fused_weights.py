"""Row layout of the fused QKV and gate/up weights of llama.py.

Checkpoints, initialization, stochastic rounding and export use canonical (Hugging Face) parameters;
the forward pass uses few, large matrices. Tensor-parallel and data-parallel shards are consecutive
rows, so lists of row ranges describe both.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hlat.config.model import ModelConfig


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a canonical parameter, or elements of a vector."""

    name: str
    start: int
    num_rows: int


def list_row_ranges(model: ModelConfig, name: str, num_rows: int) -> tuple[RowRange, ...]:
    """Return the canonical rows of an unsharded parameter of llama.Llama, in order."""
    canonical = name if name.startswith("lm_head.") else f"model.{name}"
    if name.endswith(".self_attn.qkv_proj.weight"):
        groups = range(model.num_key_value_heads)
        return list_qkv_row_ranges(model, canonical, groups, model.num_key_value_groups)
    if name.endswith(".mlp.gate_up_proj.weight"):
        block_size = compute_gate_up_block_size(model)
        return tuple(
            RowRange(canonical.replace("gate_up_proj", projection), start, block_size)
            for start in range(0, model.intermediate_size, block_size)
            for projection in ("gate_proj", "up_proj")
        )
    return (RowRange(canonical, 0, num_rows),)


def list_qkv_row_ranges(
    model: ModelConfig, name: str, groups: Iterable[int], num_queries: int, first_query: int = 0
) -> tuple[RowRange, ...]:
    """Return the rows of q/k/v: for each group its query heads, key head and value head.

    The canonical name is that of the fused projection, `...qkv_proj.weight`. Query heads are
    counted within their group.
    """
    return tuple(
        RowRange(
            name.replace("qkv_proj", projection), head * model.head_dim, num_heads * model.head_dim
        )
        for group in groups
        for projection, head, num_heads in (
            ("q_proj", group * model.num_key_value_groups + first_query, num_queries),
            ("k_proj", group, 1),
            ("v_proj", group, 1),
        )
    )


def compute_gate_up_block_size(model: ModelConfig) -> int:
    """Return the rows per block of gate_up_proj, which alternates gate and up blocks.

    A tensor-parallel degree divides both the query heads and I, so gcd(I, heads) block pairs are
    the longest blocks of which each shard has complete pairs. Long blocks keep the result of SwiGLU
    contiguous; with blocks of one row it takes twice as long on a CPU.
    """
    return model.intermediate_size // math.gcd(model.intermediate_size, model.num_attention_heads)


def slice_row_ranges(row_ranges: Iterable[RowRange], start: int, stop: int) -> tuple[RowRange, ...]:
    """Return rows `start` to `stop`, counted over all ranges and clipped to them."""
    selected, offset = [], 0
    for row_range in row_ranges:
        first, last = max(start - offset, 0), min(stop - offset, row_range.num_rows)
        if first < last:
            selected.append(RowRange(row_range.name, row_range.start + first, last - first))
        offset += row_range.num_rows
    return tuple(selected)


def count_rows(row_ranges: Iterable[RowRange]) -> int:
    """Return the total number of rows."""
    return sum(row_range.num_rows for row_range in row_ranges)
