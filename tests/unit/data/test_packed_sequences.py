"""Test document ids and the loss mask."""

import itertools

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


def test_eos_has_the_id_of_the_document_before_it() -> None:
    documents = compute_document_ids(ROWS, E)
    assert documents.dtype == np.int32
    assert documents.tolist() == [
        [0, 0, 1, 1, 1, 2, 3],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 1, 1, 1, 1, 1],
    ]


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_document_ids_count_preceding_eos_tokens(rows: list[list[int]]) -> None:
    found = compute_document_ids(np.array(rows, np.int32), 0)
    assert found.tolist() == [[row[:i].count(0) for i in range(5)] for row in rows]


B = 8
DOCUMENTS = [[B, 1, E], [B, 2, 3, E], [B, 4, E]]


def _pack(documents: list[list[int]], length: int, start: int) -> tuple[np.ndarray, list[int]]:
    """Return a row of concatenated documents, and the document of each of its tokens."""
    tokens = [token for document in documents for token in document][start : start + length]
    ids = [i for i, document in enumerate(documents) for _ in document][start : start + length]
    return np.array([tokens], np.int32), [i - ids[0] for i in ids]


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("bos_token_id", [B, E])
def test_bos_has_the_id_of_the_document_after_it(bos_token_id: int, start: int) -> None:
    documents = [[bos_token_id, *document[1:]] for document in DOCUMENTS]
    row, expected = _pack(documents, 7, start)
    assert compute_document_ids(row, E, bos_token_id).tolist() == [expected]
    # With the mask, BOS is not a target, but the first token after it is
    sequences = PackedSequences(row, compute_document_ids(row, E, bos_token_id))
    mask = compute_loss_mask(sequences, mask_document_starts=True)
    assert mask[0, 1:].tolist() == [a == b for a, b in itertools.pairwise(expected)]
    assert compute_loss_mask(sequences, mask_document_starts=False).sum() == 6


@given(
    documents=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=6, max_size=9),
    start=st.integers(0, 6),
    is_bos_eos=st.booleans(),
)
def test_ids_of_documents_with_bos_count_them(documents, start, is_bos_eos: bool) -> None:
    bos_token_id = E if is_bos_eos else B
    row, expected = _pack([[bos_token_id, *ids, E] for ids in documents], 12, start)
    assert compute_document_ids(row, E, bos_token_id).tolist() == [expected]


def test_loss_excludes_first_tokens_of_rows_and_masked_documents() -> None:
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
def test_document_ids_are_computed_if_an_option_requires_them(option: str) -> None:
    assert build_packed_sequences(ROWS, E, DataConfig()).document_ids is None
    asked = build_packed_sequences(ROWS, E, DataConfig(**{option: True}))
    np.testing.assert_array_equal(asked.document_ids, compute_document_ids(ROWS, E))
    with_bos = build_packed_sequences(ROWS, E, DataConfig(**{option: True}), E)
    np.testing.assert_array_equal(with_bos.document_ids, compute_document_ids(ROWS, E, E))
