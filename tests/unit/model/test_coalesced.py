"""Rows of the coalesced parameters: each canonical row stands once, wherever they are cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hlat.config.model import Model
from hlat.model import coalesced
from hlat.model.canonical_views import views
from hlat.model.coalesced import Rows

MODEL = Model("cut", 1, 96, 104, 6, 2, 131)
NAMES = {
    "layers.0.self_attn.qkv_proj.weight": 160,
    "layers.0.mlp.gate_up_proj.weight": 208,
    "layers.0.mlp.down_proj.weight": 96,
}


def row_numbers(parts: tuple[Rows, ...]) -> list[tuple[str, int]]:
    return [(part.name, part.first + i) for part in parts for i in range(part.count)]


@pytest.mark.parametrize(("name", "num_rows"), NAMES.items())
def test_every_canonical_row_stands_once(name: str, num_rows: int) -> None:
    numbers = row_numbers(coalesced.rows(MODEL, name, num_rows))
    assert len(numbers) == num_rows
    for canonical in {canonical for canonical, _ in numbers}:
        mine = [number for found, number in numbers if found == canonical]
        assert mine == list(range(len(mine)))


@given(st.sampled_from(sorted(NAMES)), st.integers(0, 220), st.integers(0, 220))
def test_a_cut_is_a_slice(name: str, start: int, stop: int) -> None:
    whole = coalesced.rows(MODEL, name, NAMES[name])
    assert row_numbers(coalesced.cut(whole, start, stop)) == row_numbers(whole)[start:stop]


@given(st.sampled_from(sorted(NAMES)), st.integers(0, 220), st.integers(0, 220))
def test_views_hold_what_the_rows_say(name: str, start: int, stop: int) -> None:
    parts = coalesced.cut(coalesced.rows(MODEL, name, NAMES[name]), start, stop)
    numbers = row_numbers(parts)
    tensor = torch.arange(len(numbers)).unsqueeze(1).expand(-1, 3)
    seen = []
    for rows, view, begin in views(parts, tensor):
        flat = view.reshape(-1, 3)
        assert flat.shape == (rows.count, 3)
        assert flat[0, 0] == begin
        for i, place in enumerate(flat[:, 0].tolist()):
            assert numbers[place] == (rows.name, rows.first + i)
            seen.append(place)
    assert sorted(seen) == list(range(len(numbers)))


def test_whole_parameters_have_one_view_each() -> None:
    for name, num_rows in NAMES.items():
        parts = coalesced.rows(MODEL, name, num_rows)
        found = [rows.name for rows, _, _ in views(parts, torch.empty(num_rows, 2))]
        assert len(found) == len(set(found))
