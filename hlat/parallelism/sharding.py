"""Sharding rules of parameters over tensor-parallel ranks, and of layers over pipeline stages.

The rules are keyed by canonical names and shared by the engines and the planner. Column and row
parallelism are Megatron's (arXiv 1909.08053, section 3; sequence parallelism: 2205.05198).
"""

import math
from enum import Enum
from fnmatch import fnmatchcase

from hlat.config.model import ModelConfig


class ShardingRule(Enum):
    """How a parameter is sharded over tensor-parallel ranks."""

    vocabulary = "vocabulary"
    """Sharded over rows, one per token. If the ranks do not divide the rows, the last shard is
    shorter or padded with rows that are never read."""
    column = "column"
    """Sharded over rows of the weight (output features): q, k, v by whole heads, gate and up by the
    same features."""
    row = "row"
    """Sharded over columns of the weight (input features); partial outputs are all-reduced."""
    replicated = "norm"
    """Replicated. Under sequence parallelism each rank computes the gradient from its shard of the
    tokens, so the gradient is all-reduced."""


SHARDING_PLAN: tuple[tuple[str, ShardingRule], ...] = (
    ("model.embed_tokens.weight", ShardingRule.vocabulary),
    ("model.layers.*.input_layernorm.weight", ShardingRule.replicated),
    ("model.layers.*.self_attn.[qkv]_proj.weight", ShardingRule.column),
    ("model.layers.*.self_attn.o_proj.weight", ShardingRule.row),
    ("model.layers.*.post_attention_layernorm.weight", ShardingRule.replicated),
    ("model.layers.*.mlp.gate_proj.weight", ShardingRule.column),
    ("model.layers.*.mlp.up_proj.weight", ShardingRule.column),
    ("model.layers.*.mlp.down_proj.weight", ShardingRule.row),
    ("model.norm.weight", ShardingRule.replicated),
    ("lm_head.weight", ShardingRule.vocabulary),
)
"""Glob pattern on canonical names and its rule; each name matches exactly one pattern."""


def find_sharding_rule(name: str) -> ShardingRule:
    """Return the rule of a canonical name.

    Raises:
        KeyError: No pattern matches.
    """
    for pattern, rule in SHARDING_PLAN:
        if fnmatchcase(name, pattern):
            return rule
    raise KeyError(name)


def compute_local_shape(
    name: str, shape: tuple[int, ...], model: ModelConfig, tp: int
) -> tuple[int, ...]:
    """Return the shape of one tensor-parallel shard; the largest if shards differ.

    A shard has at least one key/value head: with fewer heads than ranks, heads are replicated. The
    vocabulary is padded to a multiple of tp.
    """
    rule = find_sharding_rule(name)
    if rule is ShardingRule.replicated:
        return shape
    if rule is ShardingRule.row:
        return (shape[0], _ceil_div(shape[1], tp))
    if rule is ShardingRule.vocabulary or ".mlp." in name:
        return (_ceil_div(shape[0], tp), shape[1])
    num_heads = shape[0] // model.head_dim
    return (_ceil_div(num_heads, tp) * model.head_dim, shape[1])


def compute_local_numel(name: str, shape: tuple[int, ...], model: ModelConfig, tp: int) -> int:
    """Return the number of elements of `compute_local_shape`."""
    return math.prod(compute_local_shape(name, shape, model, tp))


def assign_layers_to_stages(num_layers: int, pp: int) -> tuple[range, ...]:
    """Return the decoder layers of each pipeline stage, in order.

    If pp does not divide the layers, the stages just before the last get one more. The last stage
    also computes the head and the loss, and the remainder is smaller than pp, so it never gets one.
    In 1F1B an earlier stage stores activations of more micro batches, so later stages have the
    memory.
    """
    assert pp <= num_layers
    quotient, remainder = divmod(num_layers, pp)
    sizes = [quotient + (pp - 1 - remainder <= stage < pp - 1) for stage in range(pp)]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
