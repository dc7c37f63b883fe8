"""Shards cover every parameter, and each element has one owner."""

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config.model import ModelConfig
from hlat.distributed.parameter_shards import compute_shard, count_kv_replicas
from hlat.distributed.tensor_slice import TensorSlice
from hlat.model.decoder_spec import list_module_parameters, list_parameter_specs
from tests.support.tensor_slices import is_partition


@st.composite
def layouts(draw):
    """Generate a model and a valid tensor-parallel degree."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    degrees = [
        tp for tp in range(1, heads + 1)
        if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    ]  # fmt: skip
    tp = draw(st.sampled_from(degrees))
    intermediate = draw(st.integers(1, 5)) * tp
    vocabulary = draw(st.integers(tp * tp, 300))
    return ModelConfig("drawn", 1, heads * 4, intermediate, heads, kv_heads, vocabulary), tp


def list_owned_slices(model: ModelConfig, tp: int, zero: int) -> dict[str, list[TensorSlice]]:
    """Return the owned slices of all ranks by canonical name, with `zero` data-parallel ranks."""
    slices: dict[str, list[TensorSlice]] = {}
    for parameter in list_module_parameters(model):
        for rank in range(tp):
            shard = compute_shard(parameter, tp, rank)
            step = -(-shard.shape[0] // zero)
            for part in (shard.slice_rows(i * step, (i + 1) * step) for i in range(zero)):
                start = 0
                for rows in part.rows:
                    owned = min(max(part.num_owned_rows - start, 0), rows.num_rows)
                    columns = [] if part.columns is None else [part.columns]
                    owned_slice = TensorSlice(
                        (rows.start, *(first for first, _ in columns)),
                        (owned, *(count for _, count in columns)),
                    )
                    if owned:
                        slices.setdefault(rows.name, []).append(owned_slice)
                    start += rows.num_rows
    return slices


@given(layouts(), st.sampled_from([1, 3]))
def test_every_element_is_owned_once(layout: tuple[ModelConfig, int], zero: int) -> None:
    model, tp = layout
    slices = list_owned_slices(model, tp, zero)
    for parameter in list_parameter_specs(model):
        assert is_partition(slices[parameter.name], parameter.shape), parameter.name


@given(layouts())
def test_shard_shapes_equal_the_sharding_plan(layout: tuple[ModelConfig, int]) -> None:
    model, tp = layout
    by_name = {parameter.name: parameter for parameter in list_parameter_specs(model)}
    for parameter in list_module_parameters(model):
        rows: dict[str, int] = {}
        shard = compute_shard(parameter, tp, 0)
        for part in shard.rows:
            rows[part.name] = rows.get(part.name, 0) + part.num_rows
        for canonical, count in rows.items():
            local = by_name[canonical].compute_local_shape(tp)
            assert (count, *shard.shape[1:]) == local


@pytest.mark.parametrize(("kv_heads", "tp", "num_replicas"), [(8, 8, 1), (8, 32, 4), (1, 4, 4)])
def test_kv_replicas(kv_heads: int, tp: int, num_replicas: int) -> None:
    model = ModelConfig("num_replicas", 1, 256, 64, 64, kv_heads, 100)
    assert count_kv_replicas(model, tp) == num_replicas
    name = "layers.0.self_attn.qkv_proj.weight"
    (qkv_proj,) = (p for p in list_module_parameters(model) if p.name == name)
    keys = [
        next(rows.start for rows in compute_shard(qkv_proj, tp, rank).rows if "k_proj" in rows.name)
        for rank in range(tp)
    ]
    assert keys == [
        int(rank) // num_replicas * max(1, kv_heads // tp) * 4 for rank in np.arange(tp)
    ]
    assert gcd(tp, num_replicas) == num_replicas
