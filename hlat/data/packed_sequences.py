"""Packed token sequences, their document ids and their loss mask.

A sequence contains the end of one document, complete documents and the start of the next one. The
settings data.document_mask and data.loss_mask select the uses of the document ids.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.config.data import DataConfig


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of equal length, one per row."""

    tokens: NDArray[np.int32]
    """Token ids [n, s]."""
    document_ids: NDArray[np.int32] | None = None
    """Index, within its row, of the document of each token, [n, s]; None if not needed."""
    target_mask: NDArray[np.bool_] | None = None
    """True for each token in the loss of an evaluation, [n, s]; None for all."""

    def select(self, rows: slice | NDArray[np.int64]) -> "PackedSequences":
        """Return some of the sequences."""
        ids, mask = self.document_ids, self.target_mask
        return PackedSequences(
            self.tokens[rows],
            None if ids is None else ids[rows],
            None if mask is None else mask[rows],
        )


def compute_document_ids(
    tokens: NDArray[np.int32], eos_token_id: int, bos_token_id: int | None = None
) -> NDArray[np.int32]:
    """Return the number of documents that end before each position of its row of tokens [n, s].

    An EOS belongs to the document that it ends, a BOS to the document that it starts. If both are
    the same token, a document starts at the second of two in succession, as no document is empty.

    Returns:
        Document ids [n, s], non-decreasing from 0 in each row.
    """
    is_start = np.zeros(tokens.shape, np.bool_)
    is_start[:, 1:] = tokens[:, :-1] == eos_token_id
    if bos_token_id is not None:
        is_start[:, 1:] &= tokens[:, 1:] == bos_token_id
    document_ids: NDArray[np.int32] = np.cumsum(is_start, axis=1, dtype=np.int32)
    return document_ids


def build_packed_sequences(
    tokens: NDArray[np.int32], eos_token_id: int, data: DataConfig, bos_token_id: int | None = None
) -> PackedSequences:
    """Return sequences of tokens [n, s], with document ids if `data` enables a mask."""
    needs_ids = data.document_mask or data.loss_mask
    return PackedSequences(
        tokens, compute_document_ids(tokens, eos_token_id, bos_token_id) if needs_ids else None
    )


def compute_loss_mask(sequences: PackedSequences, mask_document_starts: bool) -> NDArray[np.bool_]:
    """Return True for each token in the loss, [n, s].

    The first token of a row has no prediction. `mask_document_starts` also excludes the first token
    of a document, whose prediction uses the previous document. `sequences.target_mask` excludes
    further tokens.
    """
    mask = np.ones(sequences.tokens.shape, np.bool_)
    mask[:, 0] = False
    if mask_document_starts:
        ids = sequences.document_ids
        assert ids is not None
        mask[:, 1:] = ids[:, 1:] == ids[:, :-1]
    if sequences.target_mask is not None:
        mask &= sequences.target_mask
    return mask
