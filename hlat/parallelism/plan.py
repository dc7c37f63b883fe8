"""How parameters are cut over tensor-parallel ranks, and layers over pipeline stages, as data.

The model never says how it is sharded and engines differ in how they shard; this list, on canonical
names, is what they and the planner agree on. Its columns and rows are Megatron's (arXiv 1909.08053,
section 3; sequence parallelism: 2205.05198).
"""

import math
from enum import Enum
from fnmatch import fnmatchcase

from hlat.config.model import Model


class Rule(Enum):
    """Ways to cut a parameter."""

    vocabulary = "vocabulary"
    """Rows, which are tokens, are cut; where ranks cannot have equally many, the last has fewer, or
    rows that nobody sees."""
    column = "column"
    """Rows of the weight, which are outputs, are cut: q, k, v by whole heads, gate and up alike."""
    row = "row"
    """Columns of the weight, which are inputs, are cut; the partial outputs are summed."""
    norm = "norm"
    """Not cut; under sequence parallelism each rank sees some tokens only, so its gradient is
    summed over ranks."""


PLAN: tuple[tuple[str, Rule], ...] = (
    ("model.embed_tokens.weight", Rule.vocabulary),
    ("model.layers.*.input_layernorm.weight", Rule.norm),
    ("model.layers.*.self_attn.[qkv]_proj.weight", Rule.column),
    ("model.layers.*.self_attn.o_proj.weight", Rule.row),
    ("model.layers.*.post_attention_layernorm.weight", Rule.norm),
    ("model.layers.*.mlp.gate_proj.weight", Rule.column),
    ("model.layers.*.mlp.up_proj.weight", Rule.column),
    ("model.layers.*.mlp.down_proj.weight", Rule.row),
    ("model.norm.weight", Rule.norm),
    ("lm_head.weight", Rule.vocabulary),
)
"""Glob pattern on canonical names, and the rule for what matches; each name matches one pattern."""


def rule(name: str) -> Rule:
    """The rule for a canonical name.

    Raises:
        KeyError: No pattern matches.
    """
    for pattern, found in PLAN:
        if fnmatchcase(name, pattern):
            return found
    raise KeyError(name)


def local_shape(name: str, shape: tuple[int, ...], model: Model, tp: int) -> tuple[int, ...]:
    """Shape of one tensor-parallel rank's part of a parameter; the largest where ranks differ.

    Args:
        name: Canonical name.
        shape: Global shape.
        model: Shape of the model.
        tp: Tensor-parallel degree.

    Returns:
        The local shape. A rank holds at least one key/value head: with fewer heads than ranks,
        heads are replicated. The vocabulary is padded up to a multiple of tp.
    """
    found = rule(name)
    if found is Rule.norm:
        return shape
    if found is Rule.row:
        return (shape[0], _ceil(shape[1], tp))
    if found is Rule.vocabulary or ".mlp." in name:
        return (_ceil(shape[0], tp), shape[1])
    heads = shape[0] // model.head_dim
    return (_ceil(heads, tp) * model.head_dim, shape[1])


def local_numel(name: str, shape: tuple[int, ...], model: Model, tp: int) -> int:
    """Number of elements of `local_shape`."""
    return math.prod(local_shape(name, shape, model, tp))


def stage_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """Decoder layers of each pipeline stage, in order.

    When pp does not divide the layers, the stages just before the last have one more. The last also
    computes the head and the loss, and there are always fewer such layers than stages, so it never
    needs one; and a stage keeps the activations of as many micro batches as there are stages from
    it on (1F1B), so late ones have the room.
    """
    assert pp <= num_layers
    least, extra = divmod(num_layers, pp)
    sizes = [least + (pp - 1 - extra <= stage < pp - 1) for stage in range(pp)]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _ceil(whole: int, parts: int) -> int:
    return -(-whole // parts)
