"""Rows of fused parameters: each canonical row occurs once, for any sharding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hlat.config.model import ModelConfig
from hlat.distributed.parameter_shards import slice_row_ranges
from hlat.model.canonical_views import iter_row_views
from hlat.model.decoder_spec import list_module_parameters
from hlat.model.parameter_spec import RowRange

MODEL = ModelConfig("cut", 1, 96, 104, 6, 2, 131)
NAMES = {
    "layers.0.self_attn.qkv_proj.weight": 160,
    "layers.0.mlp.gate_up_proj.weight": 208,
    "layers.0.mlp.down_proj.weight": 96,
}

ROWS = {parameter.name: parameter.rows for parameter in list_module_parameters(MODEL)}


def list_rows(parts: tuple[RowRange, ...]) -> list[tuple[str, int]]:
    return [(part.name, part.start + i) for part in parts for i in range(part.num_rows)]


@pytest.mark.parametrize(("name", "num_rows"), NAMES.items())
def test_every_canonical_row_occurs_once(name: str, num_rows: int) -> None:
    rows_of_parameter = list_rows(ROWS[name])
    assert len(rows_of_parameter) == num_rows
    for canonical in {canonical for canonical, _ in rows_of_parameter}:
        rows_of_name = [number for name_, number in rows_of_parameter if name_ == canonical]
        assert rows_of_name == list(range(len(rows_of_name)))


@given(st.sampled_from(sorted(NAMES)), st.integers(0, 220), st.integers(0, 220))
def test_slices_of_row_ranges_equal_slices_of_rows(name: str, start: int, stop: int) -> None:
    full = ROWS[name]
    assert list_rows(slice_row_ranges(full, start, stop)) == list_rows(full)[start:stop]


@given(st.sampled_from(sorted(NAMES)), st.integers(0, 220), st.integers(0, 220))
def test_views_contain_the_rows_that_they_name(name: str, start: int, stop: int) -> None:
    parts = slice_row_ranges(ROWS[name], start, stop)
    rows_of_parameter = list_rows(parts)
    tensor = torch.arange(len(rows_of_parameter)).unsqueeze(1).expand(-1, 3)
    seen = []
    for rows, view, begin in iter_row_views(parts, tensor):
        flat = view.reshape(-1, 3)
        assert flat.shape == (rows.num_rows, 3)
        assert flat[0, 0] == begin
        for i, position in enumerate(flat[:, 0].tolist()):
            assert rows_of_parameter[position] == (rows.name, rows.start + i)
            seen.append(position)
    assert sorted(seen) == list(range(len(rows_of_parameter)))


def test_full_parameters_have_one_view_per_name() -> None:
    for name, num_rows in NAMES.items():
        parts = ROWS[name]
        found = [rows.name for rows, _, _ in iter_row_views(parts, torch.empty(num_rows, 2))]
        assert len(found) == len(set(found))
