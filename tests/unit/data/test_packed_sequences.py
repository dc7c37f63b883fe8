"""Test document ids and the loss mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config.data import DataConfig
from hlat.data.packed_sequences import (
    PackedSequences,
    build_packed_sequences,
    compute_document_ids,
    compute_loss_mask,
)

E = 9
ROWS = np.array([[1, E, 2, 3, E, E, 4], [1, 2, 3, 4, 5, 6, 7], [E] * 7, [E, 1, 1, 1, 1, 1, E]], np.int32)  # fmt: skip


def test_an_eos_belongs_to_the_document_that_it_ends() -> None:
    documents = compute_document_ids(ROWS, E)
    assert documents.dtype == np.int32
    assert documents.tolist() == [
        [0, 0, 1, 1, 1, 2, 3],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 1, 1, 1, 1, 1],
    ]


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_ordinals_count_the_eos_before_each_position(rows: list[list[int]]) -> None:
    found = compute_document_ids(np.array(rows, np.int32), 0)
    assert found.tolist() == [[row[:i].count(0) for i in range(5)] for row in rows]


def test_the_first_token_of_a_row_never_counts_and_of_a_document_not_under_the_mask() -> None:
    sequences = PackedSequences(ROWS, compute_document_ids(ROWS, E))
    plain, masked = (compute_loss_mask(sequences, loss_mask) for loss_mask in (False, True))
    assert plain.sum() == ROWS[:, 1:].size
    assert masked.astype(int).tolist() == [
        [0, 1, 0, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 1],
    ]
    assert compute_loss_mask(PackedSequences(ROWS), False).tolist() == plain.tolist()


@pytest.mark.parametrize("option", ["document_mask", "loss_mask"])
def test_documents_are_there_only_where_an_option_asks(option: str) -> None:
    assert build_packed_sequences(ROWS, E, DataConfig()).document_ids is None
    asked = build_packed_sequences(ROWS, E, DataConfig(**{option: True}))
    np.testing.assert_array_equal(asked.document_ids, compute_document_ids(ROWS, E))
