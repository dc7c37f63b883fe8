"""Mapping between tensors saved by neuronx-distributed (NxD) and slices of canonical parameters.

NxD saves the tensors of its layers: sharded rows or columns, projections concatenated per rank,
replicated key/value heads, and query heads ordered to match them. The mapping follows from the name
of a tensor, the number of ranks and of replicas; it does not import NxD.

Source: NxD 2.29, parallel_layers/layers.py:87 (strides), modules/qkv_linear.py:80-90 (replicas) and
scripts/checkpoint_converter.py:355-410 (query heads), as used by the Llama models of HLAT and NxDT.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from hlat.config.model import ModelConfig
from hlat.distributed.tensor_slice import TensorSlice


class KVHeadOrder(Enum):
    """Assignment of replicated key/value heads to ranks."""

    strided = "strided"
    """Replicas one set of heads apart: 0 1 2 3 0 1 2 3 (trn1)."""
    adjacent = "adjacent"
    """Replicas on adjacent ranks: 0 0 1 1 2 2 3 3 (trn2)."""


@dataclass(frozen=True)
class NxdLayout:
    """Sharding of a model by NxD over `tp` ranks, with the number and order of replicated heads."""

    tp: int
    kv_size_multiplier: int = 1
    head_order: KVHeadOrder = KVHeadOrder.strided

    @property
    def is_order_significant(self) -> bool:
        """True if the two head orders differ."""
        return 1 < self.kv_size_multiplier < self.tp

    def compute_kv_heads(self, model: ModelConfig, rank: int) -> tuple[range, int]:
        """Return the key/value heads of a rank and the index of its replica of them."""
        num_shards = self.tp // self.kv_size_multiplier
        if self.head_order is KVHeadOrder.strided:
            replica, shard = divmod(rank, num_shards)
        else:
            shard, replica = divmod(rank, self.kv_size_multiplier)
        num_heads = model.num_key_value_heads // num_shards
        return range(shard * num_heads, (shard + 1) * num_heads), replica


@dataclass(frozen=True)
class NxdParameterSlice:
    """Slice of a canonical parameter, and its first index in each dimension of a saved tensor."""

    name: str
    tensor_slice: TensorSlice
    offset: tuple[int, ...]


_QKV_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FUSED_PROJECTIONS = {
    "self_attn.qkv_proj.weight_q": _QKV_PROJECTIONS[:1],
    "self_attn.qkv_proj.weight_k": _QKV_PROJECTIONS[1:2],
    "self_attn.qkv_proj.weight_v": _QKV_PROJECTIONS[2:],
    "self_attn.qkv_proj.weight_qkv": _QKV_PROJECTIONS,
    "self_attn.qkv_proj.weight": _QKV_PROJECTIONS,
    "mlp.gate_up_proj.weight": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Projections concatenated along the rows of each rank's tensor, by its name within a layer."""

_LAYER_KEY = re.compile(r"(model\.layers\.\d+\.)(.+)")
_ROW_PARALLEL = ("o_proj", "down_proj")
_HEAD_SHARDED = ("q_proj", "k_proj", "v_proj", "o_proj")


def list_canonical_names(key: str) -> tuple[str, ...]:
    """Return the canonical names of the parameters in a saved tensor, in order."""
    layer = _LAYER_KEY.fullmatch(key)
    if layer is None or layer[2] not in _FUSED_PROJECTIONS:
        return (key,)
    return tuple(f"{layer[1]}{projection}.weight" for projection in _FUSED_PROJECTIONS[layer[2]])


def infer_kv_size_multiplier(model: ModelConfig, tp: int, key: str, num_rows: int) -> int | None:
    """Return the number of replicas of each key/value head, from the rows of a tensor on one rank.

    `key` is the name of a saved tensor that contains keys. Returns None if no number of replicas
    results in `num_rows`.
    """
    names = list_canonical_names(key)
    num_query_rows = model.hidden_size // tp if any(".q_proj." in name for name in names) else 0
    num_kv_tensors = sum(".k_proj." in name or ".v_proj." in name for name in names)
    num_kv_rows = model.num_key_value_heads * model.head_dim * num_kv_tensors
    replicas, rest = divmod((num_rows - num_query_rows) * tp, num_kv_rows)
    return replicas if replicas >= 1 and rest == 0 else None


def find_layout_problems(model: ModelConfig, layout: NxdLayout) -> list[str]:
    """Return the reasons why a layout is impossible for a model."""
    sizes = {
        "model.vocab_size": model.vocab_size,
        "model.intermediate_size": model.intermediate_size,
        "model.num_attention_heads": model.num_attention_heads,
    }
    problems = [
        f"its {layout.tp} tensor-parallel ranks do not divide {name}={size}"
        for name, size in sizes.items()
        if size % layout.tp
    ]
    num_heads, replicas = model.num_key_value_heads, layout.kv_size_multiplier
    if layout.tp % replicas or num_heads % (layout.tp // replicas):
        problems.append(
            f"its {layout.tp} tensor-parallel ranks cannot hold {replicas} copies each of "
            f"model.num_key_value_heads={num_heads}"
        )
    if model.num_key_value_groups % replicas:
        problems.append(
            f"its {replicas} copies of each key/value head do not divide the "
            f"{model.num_key_value_groups} query heads that each has in this run"
        )
    return problems


def list_parameter_slices(
    model: ModelConfig,
    layout: NxdLayout,
    rank: int,
    key: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[NxdParameterSlice, ...]:
    """Return the parameter slices in a saved tensor, from its first row or column to its last.

    `key` is the name of the tensor, `shapes` has the shapes of its canonical parameters by name.
    """
    slices, begin = [], 0
    for name in list_canonical_names(key):
        shape = shapes[name]
        axis, ranges = _compute_shard_ranges(model, layout, rank, name, shape)
        for first, count in ranges:
            offset, saved_offset, size = [0] * len(shape), [0] * len(shape), [*shape]
            offset[axis], saved_offset[axis], size[axis] = first, begin, count
            tensor_slice = TensorSlice(tuple(offset), tuple(size))
            slices.append(NxdParameterSlice(name, tensor_slice, tuple(saved_offset)))
            begin += count
    return tuple(slices)


def compute_tensor_shape(slices: Iterable[NxdParameterSlice]) -> tuple[int, ...]:
    """Return the shape of the saved tensor that consists of `slices`."""
    ends = [map(sum, zip(one.offset, one.tensor_slice.size, strict=True)) for one in slices]
    return tuple(map(max, zip(*ends, strict=True)))


def _compute_shard_ranges(
    model: ModelConfig, layout: NxdLayout, rank: int, name: str, shape: tuple[int, ...]
) -> tuple[int, list[tuple[int, int]]]:
    """Return the sharded dimension of a parameter and a rank's (first, count) ranges in it."""
    projection = name.split(".")[-2]
    axis = 1 if projection in _ROW_PARALLEL else 0
    if len(shape) == 1:
        return axis, [(0, shape[0])]
    if projection in _HEAD_SHARDED:
        return axis, list(_list_head_ranges(model, layout, rank, projection))
    size = shape[axis] // layout.tp
    return axis, [(rank * size, size)]


def _list_head_ranges(
    model: ModelConfig, layout: NxdLayout, rank: int, projection: str
) -> Iterator[tuple[int, int]]:
    """Yield the (first, count) ranges of a rank's heads.

    Each replica of a key/value head serves an equal part of the group's query heads, in order.
    """
    head_dim, group_size = model.head_dim, model.num_key_value_groups
    num_queries = group_size // layout.kv_size_multiplier
    heads, replica = layout.compute_kv_heads(model, rank)
    for head in heads:
        if projection in ("k_proj", "v_proj"):
            yield head * head_dim, head_dim
        else:
            yield (head * group_size + replica * num_queries) * head_dim, num_queries * head_dim
