"""What ranks hold of a parameter: together everything, each of it owned once."""

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.checkpoint.box import Box, tiles
from hlat.config.model import Model
from hlat.engine.shards import kv_copies, shard
from hlat.model.canonical import parameters
from hlat.parallelism.plan import local_shape

SHAPES = {
    "embed_tokens.weight": lambda m: (m.vocab_size, m.hidden_size),
    "layers.0.input_layernorm.weight": lambda m: (m.hidden_size,),
    "layers.0.self_attn.qkv_proj.weight": lambda m: (
        (m.num_attention_heads + 2 * m.num_key_value_heads) * m.head_dim,
        m.hidden_size,
    ),
    "layers.0.self_attn.o_proj.weight": lambda m: (m.hidden_size, m.hidden_size),
    "layers.0.mlp.gate_up_proj.weight": lambda m: (2 * m.intermediate_size, m.hidden_size),
    "layers.0.mlp.down_proj.weight": lambda m: (m.hidden_size, m.intermediate_size),
    "norm.weight": lambda m: (m.hidden_size,),
    "lm_head.weight": lambda m: (m.vocab_size, m.hidden_size),
    "layers.0.post_attention_layernorm.weight": lambda m: (m.hidden_size,),
}


@st.composite
def layouts(draw):
    """A model and a tensor-parallel degree that the rules accept."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    degrees = [
        tp for tp in range(1, heads + 1)
        if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    ]  # fmt: skip
    tp = draw(st.sampled_from(degrees))
    intermediate = draw(st.integers(1, 5)) * tp
    vocabulary = draw(st.integers(tp * tp, 300))
    return Model("drawn", 1, heads * 4, intermediate, heads, kv_heads, vocabulary), tp


def boxes(model: Model, tp: int, zero: int) -> dict[str, list[Box]]:
    """Owned boxes of all ranks by canonical name, each shard cut over `zero` further ranks."""
    found: dict[str, list[Box]] = {}
    for name, shape in SHAPES.items():
        for rank in range(tp):
            whole = shard(model, name, shape(model), tp, rank)
            step = -(-whole.shape[0] // zero)
            for part in (whole.cut(i * step, (i + 1) * step) for i in range(zero)):
                begin = 0
                for rows in part.rows:
                    owned = min(max(part.num_owned - begin, 0), rows.count)
                    across = [] if part.columns is None else [part.columns]
                    box = Box(
                        (rows.first, *(first for first, _ in across)),
                        (owned, *(count for _, count in across)),
                    )
                    if owned:
                        found.setdefault(rows.name, []).append(box)
                    begin += rows.count
    return found


@given(layouts(), st.sampled_from([1, 3]))
def test_every_element_is_owned_once(layout: tuple[Model, int], zero: int) -> None:
    model, tp = layout
    found = boxes(model, tp, zero)
    for parameter in parameters(model):
        assert tiles(found[parameter.name], parameter.shape), parameter.name


@given(layouts())
def test_a_rank_holds_what_the_plan_says(layout: tuple[Model, int]) -> None:
    model, tp = layout
    by_name = {parameter.name: parameter.shape for parameter in parameters(model)}
    for name, shape in SHAPES.items():
        rows: dict[str, int] = {}
        held = shard(model, name, shape(model), tp, 0)
        for part in held.rows:
            rows[part.name] = rows.get(part.name, 0) + part.count
        for canonical, count in rows.items():
            local = local_shape(canonical, by_name[canonical], model, tp)
            assert (count, *held.shape[1:]) == local


@pytest.mark.parametrize(("kv_heads", "tp", "copies"), [(8, 8, 1), (8, 32, 4), (1, 4, 4)])
def test_copies_of_a_head(kv_heads: int, tp: int, copies: int) -> None:
    model = Model("copies", 1, 256, 64, 64, kv_heads, 100)
    assert kv_copies(model, tp) == copies
    name, shape = "layers.0.self_attn.qkv_proj.weight", ((64 + 2 * kv_heads) * 4, 256)
    keys = [
        next(
            rows.first for rows in shard(model, name, shape, tp, rank).rows if "k_proj" in rows.name
        )
        for rank in range(tp)
    ]
    assert keys == [int(rank) // copies * max(1, kv_heads // tp) * 4 for rank in np.arange(tp)]
    assert gcd(tp, copies) == copies
