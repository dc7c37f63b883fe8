"""Mapping of NxD tensors to parameter slices, compared with worked examples."""

import pytest

from hlat.checkpoint.nxd_layout import (
    KVHeadOrder,
    NxdLayout,
    NxdParameterSlice,
    compute_tensor_shape,
    find_layout_problems,
    infer_kv_size_multiplier,
    list_canonical_names,
    list_parameter_slices,
)
from hlat.config.model import ModelConfig
from hlat.distributed.tensor_slice import TensorSlice
from hlat.model.decoder_spec import list_parameter_specs

HLAT_70B = ModelConfig("70b", 80, 8192, 28672, 64, 8, 32000)
SMALL = ModelConfig("small", 1, 16, 24, 4, 2, 32)  # heads of 4
SHAPES = {parameter.name: parameter.shape for parameter in list_parameter_specs(SMALL)}
ATTENTION = "model.layers.0.self_attn."


def test_gate_and_up_are_concatenated_on_each_rank() -> None:
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    assert list_parameter_slices(
        SMALL, NxdLayout(2), 1, "model.layers.0.mlp.gate_up_proj.weight", SHAPES
    ) == (
        NxdParameterSlice(gate, TensorSlice((12, 0), (12, 16)), (0, 0)),
        NxdParameterSlice(up, TensorSlice((12, 0), (12, 16)), (12, 0)),
    )


def test_a_row_parallel_layer_is_sharded_by_columns() -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    assert list_parameter_slices(SMALL, NxdLayout(2), 1, name, SHAPES) == (
        NxdParameterSlice(name, TensorSlice((0, 12), (16, 12)), (0, 0)),
    )


def test_norms_are_replicated() -> None:
    assert list_parameter_slices(SMALL, NxdLayout(2), 1, "model.norm.weight", SHAPES) == (
        NxdParameterSlice("model.norm.weight", TensorSlice((0,), (16,)), (0,)),
    )


@pytest.mark.parametrize(
    ("order", "key", "query"),
    [
        (KVHeadOrder.strided, [0, 1, 0, 1], [0, 2, 1, 3]),
        (KVHeadOrder.adjacent, [0, 0, 1, 1], [0, 1, 2, 3]),
    ],
)
def test_queries_are_on_the_ranks_of_their_keys(
    order: KVHeadOrder, key: list[int], query: list[int]
) -> None:
    layout = NxdLayout(4, kv_size_multiplier=2, head_order=order)
    for rank in range(4):
        found = list_parameter_slices(
            SMALL, layout, rank, f"{ATTENTION}qkv_proj.weight_qkv", SHAPES
        )
        assert compute_tensor_shape(found) == (12, 16)
        assert [(part.name.split(".")[-2], part.tensor_slice.offset[0] // 4) for part in found] == [
            ("q_proj", query[rank]),
            ("k_proj", key[rank]),
            ("v_proj", key[rank]),
        ]
        (output,) = list_parameter_slices(SMALL, layout, rank, f"{ATTENTION}o_proj.weight", SHAPES)
        assert output.tensor_slice == TensorSlice((0, query[rank] * 4), (16, 4))


def test_ranks_of_hlat_70b_have_the_heads_of_its_converter() -> None:
    """Rank r has key/value head r mod 8, and of group g the ranks g, g+8, g+16, g+24 have queries
    8g to 8g+7 (NxD's scripts/checkpoint_converter.py:355-410)."""
    layout = NxdLayout(32, kv_size_multiplier=4)
    shapes = {parameter.name: parameter.shape for parameter in list_parameter_specs(HLAT_70B)}
    for rank in range(32):
        (key,) = list_parameter_slices(
            HLAT_70B, layout, rank, f"{ATTENTION}qkv_proj.weight_k", shapes
        )
        (query,) = list_parameter_slices(
            HLAT_70B, layout, rank, f"{ATTENTION}qkv_proj.weight_q", shapes
        )
        assert key.tensor_slice == TensorSlice((rank % 8 * 128, 0), (128, 8192))
        assert query.tensor_slice == TensorSlice(
            ((rank % 8 * 8 + rank // 8 * 2) * 128, 0), (256, 8192)
        )


def test_canonical_names_of_fused_weights() -> None:
    assert list_canonical_names(f"{ATTENTION}qkv_proj.weight_v") == (f"{ATTENTION}v_proj.weight",)
    assert len(list_canonical_names(f"{ATTENTION}qkv_proj.weight")) == 3
    assert list_canonical_names("lm_head.weight") == ("lm_head.weight",)


def test_number_of_copies_follows_from_the_rows() -> None:
    joined = f"{ATTENTION}qkv_proj.weight_qkv"
    assert infer_kv_size_multiplier(HLAT_70B, 32, f"{ATTENTION}qkv_proj.weight_k", 128) == 4
    assert infer_kv_size_multiplier(HLAT_70B, 32, joined, 256 + 2 * 128) == 4
    assert infer_kv_size_multiplier(HLAT_70B, 8, joined, 1024 + 2 * 128) == 1
    assert infer_kv_size_multiplier(HLAT_70B, 8, joined, 1024 + 2 * 127) is None
    assert infer_kv_size_multiplier(HLAT_70B, 8, joined, 1000) is None


def test_invalid_layouts() -> None:
    assert find_layout_problems(HLAT_70B, NxdLayout(32, kv_size_multiplier=4)) == []
    assert find_layout_problems(HLAT_70B, NxdLayout(3)) == [
        "its 3 tensor-parallel ranks do not divide model.vocab_size=32000",
        "its 3 tensor-parallel ranks do not divide model.intermediate_size=28672",
        "its 3 tensor-parallel ranks do not divide model.num_attention_heads=64",
        "its 3 tensor-parallel ranks cannot hold 1 copies each of model.num_key_value_heads=8",
    ]
    assert find_layout_problems(SMALL, NxdLayout(4, kv_size_multiplier=4)) == [
        "its 4 copies of each key/value head do not divide the 2 query heads that each has in this run"
    ]
