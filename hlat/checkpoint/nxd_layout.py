"""What a tensor that a rank of neuronx-distributed (NxD) saved holds of the canonical parameters.

NxD saves what its layers hold: shares of rows or columns, projections joined rank by rank, key and
value heads in copies, query heads ordered to meet them. All of it follows from the tensor's name,
the number of ranks and of copies, so it stands here as plain boxes and is tested without NxD.

Source: NxD 2.29, parallel_layers/layers.py:87 (strides), modules/qkv_linear.py:80-90 (copies) and
scripts/checkpoint_converter.py:355-410 (query heads), as HLAT's and NxDT's Llama use them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from hlat.checkpoint.box import Box
from hlat.config.model import Model


class HeadOrder(Enum):
    """Which ranks hold copies of the same key/value heads."""

    strided = "strided"
    """Ranks as many apart as there are without copies: 0 1 2 3 0 1 2 3 (trn1)."""
    adjacent = "adjacent"
    """Ranks side by side: 0 0 1 1 2 2 3 3 (trn2)."""


@dataclass(frozen=True)
class Layout:
    """How NxD has cut a model.

    Attributes:
        tp: Tensor-parallel ranks.
        copies: Of each key/value head, NxD's kv_size_multiplier.
        order: Of these copies.
    """

    tp: int
    copies: int = 1
    order: HeadOrder = HeadOrder.strided

    @property
    def ordered(self) -> bool:
        """Whether the order makes a difference."""
        return 1 < self.copies < self.tp

    def heads(self, model: Model, rank: int) -> tuple[range, int]:
        """Key/value heads of a rank, and the number of its copy of them."""
        shares = self.tp // self.copies
        if self.order is HeadOrder.strided:
            share, copy = rank % shares, rank // shares
        else:
            share, copy = rank // self.copies, rank % self.copies
        count = model.num_key_value_heads // shares
        return range(share * count, (share + 1) * count), copy


@dataclass(frozen=True)
class Part:
    """A box of a canonical parameter in a saved tensor.

    Attributes:
        name: Canonical name.
        box: Which part of it.
        offset: Where it begins in the saved tensor, per dimension.
    """

    name: str
    box: Box
    offset: tuple[int, ...]


_JOINED = {
    "self_attn.qkv_proj.weight_q": ("self_attn.q_proj",),
    "self_attn.qkv_proj.weight_k": ("self_attn.k_proj",),
    "self_attn.qkv_proj.weight_v": ("self_attn.v_proj",),
    "self_attn.qkv_proj.weight_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.qkv_proj.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Projections one below the other in each rank's tensor, by its name within a layer."""

_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_BY_COLUMNS = ("o_proj", "down_proj")
_BY_HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")


def held(key: str) -> tuple[str, ...]:
    """Canonical names of what a tensor holds, in order; its own name where nothing is joined."""
    layer = _LAYER.fullmatch(key)
    if layer is None or layer[2] not in _JOINED:
        return (key,)
    return tuple(f"{layer[1]}{projection}.weight" for projection in _JOINED[layer[2]])


def copies_of_heads(model: Model, tp: int, key: str, rows: int) -> int | None:
    """Copies of each key/value head, from the rows that one rank's tensor with keys has.

    Args:
        model: Shape of the model.
        tp: Tensor-parallel ranks.
        key: Name of the tensor.
        rows: Of it.

    Returns:
        None where no number of copies gives as many rows.
    """
    names = held(key)
    queries = model.hidden_size // tp if any(".q_proj." in name for name in names) else 0
    keys = sum(".k_proj." in name or ".v_proj." in name for name in names)
    once = model.num_key_value_heads * model.head_dim * keys
    copies, rest = divmod((rows - queries) * tp, once)
    return copies if copies >= 1 and rest == 0 else None


def problems(model: Model, layout: Layout) -> list[str]:
    """Why so many ranks and copies cannot have trained the model."""
    counts = {
        "model.vocab_size": model.vocab_size,
        "model.intermediate_size": model.intermediate_size,
        "model.num_attention_heads": model.num_attention_heads,
    }
    found = [
        f"its {layout.tp} tensor-parallel ranks do not divide {name}={count}"
        for name, count in counts.items()
        if count % layout.tp
    ]
    heads, shares = model.num_key_value_heads, layout.tp // layout.copies
    if layout.tp % layout.copies or heads % shares:
        found.append(
            f"its {layout.tp} tensor-parallel ranks cannot hold {layout.copies} copies each of "
            f"model.num_key_value_heads={heads}"
        )
    if model.queries_per_group % layout.copies:
        found.append(
            f"its {layout.copies} copies of each key/value head do not divide the "
            f"{model.queries_per_group} query heads that each has in this run"
        )
    return found


def parts(
    model: Model, layout: Layout, rank: int, key: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Part, ...]:
    """What a tensor holds, from its first row, or column, to its last.

    Args:
        model: Shape of the model, which the layout divides.
        layout: How it was cut.
        rank: Tensor-parallel rank that saved the tensor.
        key: Name of the tensor.
        shapes: Of the canonical parameters that it holds, by name.
    """
    found, begin = [], 0
    for name in held(key):
        axis, runs = _cut(model, layout, rank, name, shapes[name])
        for first, count in runs:
            offset, at, size = [0] * len(shapes[name]), [0] * len(shapes[name]), [*shapes[name]]
            offset[axis], at[axis], size[axis] = first, begin, count
            found.append(Part(name, Box(tuple(offset), tuple(size)), tuple(at)))
            begin += count
    return tuple(found)


def extent(parts: Iterable[Part]) -> tuple[int, ...]:
    """Shape of the tensor that these parts fill."""
    ends = [map(sum, zip(part.offset, part.box.size, strict=True)) for part in parts]
    return tuple(map(max, zip(*ends, strict=True)))


def _cut(
    model: Model, layout: Layout, rank: int, name: str, shape: tuple[int, ...]
) -> tuple[int, list[tuple[int, int]]]:
    """The dimension along which a parameter is cut, and a rank's runs of indices along it."""
    projection = name.split(".")[-2]
    axis = 1 if projection in _BY_COLUMNS else 0
    if len(shape) == 1:
        return axis, [(0, shape[0])]
    if projection in _BY_HEADS:
        return axis, list(_heads(model, layout, rank, projection))
    share = shape[axis] // layout.tp
    return axis, [(rank * share, share)]


def _heads(model: Model, layout: Layout, rank: int, projection: str) -> Iterator[tuple[int, int]]:
    """Rows, or columns, of a rank's heads.

    Each copy of a key/value head serves its share of the query heads of the group, in order.
    """
    size, group = model.head_dim, model.queries_per_group
    share = group // layout.copies
    heads, copy = layout.heads(model, rank)
    for head in heads:
        if projection in ("k_proj", "v_proj"):
            yield head * size, size
        else:
            yield (head * group + copy * share) * size, share * size
