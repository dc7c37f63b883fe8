"""Rows of the coalesced parameters: each canonical row stands once, wherever they are cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hlat.config.model import ModelConfig
from hlat.engine.parameter_shards import slice_row_ranges
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


def row_numbers(parts: tuple[RowRange, ...]) -> list[tuple[str, int]]:
    return [(part.name, part.start + i) for part in parts for i in range(part.num_rows)]


@pytest.mark.parametrize(("name", "num_rows"), NAMES.items())
def test_every_canonical_row_stands_once(name: str, num_rows: int) -> None:
    numbers = row_numbers(ROWS[name])
    assert len(numbers) == num_rows
    for canonical in {canonical for canonical, _ in numbers}:
        rows_of_name = [number for name_, number in numbers if name_ == canonical]
        assert rows_of_name == list(range(len(rows_of_name)))


@given(st.sampled_from(sorted(NAMES)), st.integers(0, 220), st.integers(0, 220))
def test_a_cut_is_a_slice(name: str, start: int, stop: int) -> None:
    full = ROWS[name]
    assert row_numbers(slice_row_ranges(full, start, stop)) == row_numbers(full)[start:stop]


@given(st.sampled_from(sorted(NAMES)), st.integers(0, 220), st.integers(0, 220))
def test_views_hold_what_the_rows_say(name: str, start: int, stop: int) -> None:
    parts = slice_row_ranges(ROWS[name], start, stop)
    numbers = row_numbers(parts)
    tensor = torch.arange(len(numbers)).unsqueeze(1).expand(-1, 3)
    seen = []
    for rows, view, begin in iter_row_views(parts, tensor):
        flat = view.reshape(-1, 3)
        assert flat.shape == (rows.num_rows, 3)
        assert flat[0, 0] == begin
        for i, place in enumerate(flat[:, 0].tolist()):
            assert numbers[place] == (rows.name, rows.start + i)
            seen.append(place)
    assert sorted(seen) == list(range(len(numbers)))


def test_whole_parameters_have_one_view_each() -> None:
    for name, num_rows in NAMES.items():
        parts = ROWS[name]
        found = [rows.name for rows, _, _ in iter_row_views(parts, torch.empty(num_rows, 2))]
        assert len(found) == len(set(found))
