"""Packed sequences, and the documents that lie in them.

A sequence holds the end of one document, some whole ones and the beginning of the next. Which token
belongs to which is told here once; whether attention, positions or the loss care is the
configuration's to say (data.document_mask, data.loss_mask).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.config.data import Data


@dataclass(frozen=True)
class Sequences:
    """Sequences of equal length, one per row."""

    tokens: NDArray[np.int32]
    """Token ids [n, s]."""
    documents: NDArray[np.int32] | None = None
    """Ordinal, within its row, of the document that each token belongs to, [n, s]; None where
    nothing asks for it."""
    num_counted: int | None = None
    """Targets at the beginning of each row beyond which an evaluation counts none; None: all
    count."""


def document_ordinals(tokens: NDArray[np.int32], eos: int) -> NDArray[np.int32]:
    """Number of eos tokens before each position of its row.

    An eos belongs to the document that it ends.

    Args:
        tokens: Token ids [n, s].
        eos: The token that ends a document.

    Returns:
        Ordinals [n, s], from 0 in each row, never falling.
    """
    ends = (tokens == eos).astype(np.int32)
    ordinals: NDArray[np.int32] = np.cumsum(ends, axis=1, dtype=np.int32) - ends
    return ordinals


def in_documents(tokens: NDArray[np.int32], eos: int, data: Data) -> Sequences:
    """Sequences of packed tokens [n, s], with their documents if an option asks for them."""
    asked = data.document_mask or data.loss_mask
    return Sequences(tokens, document_ordinals(tokens, eos) if asked else None)


def counted_targets(sequences: Sequences, loss_mask: bool) -> NDArray[np.bool_]:
    """Which tokens the loss counts, [n, s].

    The first token of a row is predicted from nothing and never counts. With `loss_mask`, that of a
    document does not either: it would be predicted from the end of another document. Nor does what
    the sequences themselves leave out.
    """
    counted = np.ones(sequences.tokens.shape, np.bool_)
    counted[:, 0] = False
    if loss_mask:
        assert sequences.documents is not None
        counted[:, 1:] = sequences.documents[:, 1:] == sequences.documents[:, :-1]
    if sequences.num_counted is not None:
        counted[:, 1 + sequences.num_counted :] = False
    return counted
