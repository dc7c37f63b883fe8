"""Tokens, documents and epochs read from each source, in total and by stage.

Table III of the paper is such a ledger. It is computed from the stream states, so it is exact and
independent of the number of ranks.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from hlat.data.batch_reader import DataCursor, StreamStates
from hlat.data.token_streams import NUM_CURSOR_FIELDS

_DOCUMENT_FIELD, _TOKEN_FIELD = 0, 3
"""Indices of `SourceCursor.document` and `SourceCursor.tokens` among its fields."""


class SourceUsage(TypedDict):
    """Amount read from one source (JSON-able)."""

    tokens: int
    documents: int
    """Finished documents, including empty ones."""
    epochs: float
    """Finished documents divided by the training documents of the source."""


class LedgerEntry(NamedTuple):
    """A finished stage and the totals at its end (JSON-able)."""

    stage_name: str
    end_step: int
    """The step after its last one."""
    totals: list[list[int]]
    """Documents and tokens of each source since the start of the run."""

    def remap_sources(self, saved: Sequence[str], current: Sequence[str]) -> "LedgerEntry":
        """Return the entry for another list of sources, with zeros for new ones."""
        totals = dict(zip(saved, self.totals, strict=False))
        return self._replace(totals=[totals.get(name, [0, 0]) for name in current])


def merge_ledger_entries(*entries: Sequence[Any]) -> LedgerEntry:
    """Return the sum of one stage's entries, in JSON, over ranks."""
    name, end_step, _ = entries[0]
    return LedgerEntry(name, end_step, np.sum([totals for _, _, totals in entries], 0).tolist())


def compute_totals(states: StreamStates) -> NDArray[np.int64]:
    """Return the documents and tokens that the streams read from every source, [sources, 2]."""
    cursors = states[:, 2:].reshape(len(states), -1, NUM_CURSOR_FIELDS)
    totals: NDArray[np.int64] = cursors[:, :, [_DOCUMENT_FIELD, _TOKEN_FIELD]].sum(0)
    return totals


def build_source_usage(
    totals: NDArray[np.int64], documents_per_epoch: Mapping[str, int]
) -> dict[str, SourceUsage]:
    """Return totals [sources, 2] by source name."""
    rows = zip(documents_per_epoch.items(), totals.tolist(), strict=True)
    return {
        name: SourceUsage(tokens=tokens, documents=documents, epochs=documents / size)
        for (name, size), (documents, tokens) in rows
    }


def compute_usage_by_stage(
    entries: Sequence[LedgerEntry], cursor: DataCursor, documents_per_epoch: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the usage of each stage by source, including the current stage (JSON-able)."""
    current = LedgerEntry(cursor.stage.name, cursor.step, compute_totals(cursor.states).tolist())
    entries = [LedgerEntry("", 0, np.zeros_like(current.totals).tolist()), *entries, current]
    return [
        {
            "name": entry.stage_name,
            "start": previous.end_step,
            "sources": build_source_usage(
                np.subtract(entry.totals, previous.totals), documents_per_epoch
            ),
        }
        for previous, entry in pairwise(entries)
    ]
