"""How the coalesced parameters of llama.py hold the canonical ones, as pure row numbers.

Checkpoints, initial values, noise, export and every test against another implementation speak
canonical names; the forward pass wants few, large matrices. Every cut, over tensor-parallel ranks
or over data-parallel ones, takes consecutive rows, so a list of rows serves them all.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hlat.config.model import Model


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a canonical parameter; of a vector, elements.

    Attributes:
        name: Canonical name.
        first: The first of them.
        count: How many.
    """

    name: str
    first: int
    count: int


def rows(model: Model, name: str, num_rows: int) -> tuple[Rows, ...]:
    """What a parameter holds, from its first row to its last.

    Args:
        model: Shape of the model.
        name: Parameter name of llama.Llama.
        num_rows: Rows of the whole parameter.
    """
    canonical = name if name.startswith("lm_head.") else f"model.{name}"
    if name.endswith(".self_attn.qkv_proj.weight"):
        return qkv_rows(model, canonical, range(model.num_key_value_heads), model.queries_per_group)
    if name.endswith(".mlp.gate_up_proj.weight"):
        return _gate_up_rows(model, canonical)
    return (Rows(canonical, 0, num_rows),)


def qkv_rows(
    model: Model, name: str, groups: Iterable[int], queries: int, first_query: int = 0
) -> tuple[Rows, ...]:
    """Rows of q/k/v: for each group its query heads, its key head, its value head.

    Args:
        model: Shape of the model.
        name: Canonical name but for the projection, `...qkv_proj.weight`.
        groups: Key/value heads, in order.
        queries: Query heads that stand with each.
        first_query: The first of them, counted within its group.
    """
    size = model.head_dim

    def projection(which: str, first_head: int, num_heads: int) -> Rows:
        return Rows(name.replace("qkv_proj", which), first_head * size, num_heads * size)

    return tuple(
        part
        for group in groups
        for part in (
            projection("q_proj", group * model.queries_per_group + first_query, queries),
            projection("k_proj", group, 1),
            projection("v_proj", group, 1),
        )
    )


def gate_up_block(model: Model) -> int:
    """Rows of a block of gates, and of the block of ups that follows it, in gate_up_proj.

    A tensor-parallel degree divides the query heads and I, hence gcd(I, heads), which is the number
    of block pairs: these are the longest blocks of which every shard holds whole pairs. Long blocks
    keep the product of gate and up contiguous in memory; from single rows it takes twice as long
    on a CPU.
    """
    return model.intermediate_size // math.gcd(model.intermediate_size, model.num_attention_heads)


def cut(parts: Iterable[Rows], start: int, stop: int) -> tuple[Rows, ...]:
    """The rows from `start` to `stop`, counted over all parts; what lies beyond is not there."""
    kept, begin = [], 0
    for part in parts:
        first, last = max(start - begin, 0), min(stop - begin, part.count)
        if first < last:
            kept.append(Rows(part.name, part.first + first, last - first))
        begin += part.count
    return tuple(kept)


def count(parts: Iterable[Rows]) -> int:
    """Rows of all parts."""
    return sum(part.count for part in parts)


def _gate_up_rows(model: Model, name: str) -> tuple[Rows, ...]:
    """Rows are, in turn: a block of gates, the block of their ups."""
    block = gate_up_block(model)
    return tuple(
        Rows(name.replace("gate_up_proj", which), first, block)
        for first in range(0, model.intermediate_size, block)
        for which in ("gate_proj", "up_proj")
    )
