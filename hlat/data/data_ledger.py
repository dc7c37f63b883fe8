"""Tokens, documents and epochs read from each source, in total and by stage.

Table III of the paper is such a ledger. It is computed from the stream states, so it is exact and
independent of the number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

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


@dataclass(frozen=True)
class LedgerEntry:
    """A finished stage and the totals at its end."""

    stage_name: str
    end_step: int
    """The step after its last one."""
    totals: NDArray[np.int64]
    """Documents and tokens since the start of the run, [sources, 2]."""

    def remap_sources(
        self, saved_sources: Sequence[str], current_sources: Sequence[str], keep_totals: bool
    ) -> "LedgerEntry":
        """Return the entry for another list of sources, with totals of zero unless `keep_totals`.

        A resumed run assigns the totals of all ranks to one rank, which preserves their sum.
        """
        totals = np.zeros((len(current_sources), 2), np.int64)
        for index, name in enumerate(current_sources):
            if keep_totals and name in saved_sources:
                totals[index] = self.totals[saved_sources.index(name)]
        return LedgerEntry(self.stage_name, self.end_step, totals)

    def to_json(self) -> list[Any]:
        """Return the fields in order."""
        return [self.stage_name, self.end_step, self.totals.tolist()]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> "LedgerEntry":
        """Return the entry that `to_json` serialized."""
        name, end_step, totals = fields
        return cls(name, end_step, np.array(totals, np.int64).reshape(-1, 2))


def merge_ledger_entries(entries: Sequence[LedgerEntry]) -> LedgerEntry:
    """Return the sum of one stage's entries over ranks."""
    totals: NDArray[np.int64] = np.sum([entry.totals for entry in entries], axis=0)
    return LedgerEntry(entries[0].stage_name, entries[0].end_step, totals)


def compute_totals(states: StreamStates) -> NDArray[np.int64]:
    """Return the documents and tokens that the streams read from every source, [sources, 2]."""
    cursors = states[:, 2:].reshape(len(states), -1, NUM_CURSOR_FIELDS)
    totals: NDArray[np.int64] = cursors[:, :, [_DOCUMENT_FIELD, _TOKEN_FIELD]].sum(0)
    return totals


def build_source_usage(
    totals: NDArray[np.int64], documents_per_epoch: Mapping[str, int]
) -> dict[str, SourceUsage]:
    """Return totals [sources, 2] by source name."""
    return {
        name: SourceUsage(
            tokens=int(tokens), documents=int(documents), epochs=int(documents) / size
        )
        for (name, size), (documents, tokens) in zip(
            documents_per_epoch.items(), totals, strict=True
        )
    }


def compute_usage_by_stage(
    entries: Sequence[LedgerEntry], cursor: DataCursor, documents_per_epoch: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the usage of each stage by source, including the current stage (JSON-able)."""
    current = LedgerEntry(cursor.stage.name, cursor.step, compute_totals(cursor.states))
    start, previous = 0, np.zeros_like(current.totals)
    stages = []
    for entry in [*entries, current]:
        usage = build_source_usage(entry.totals - previous, documents_per_epoch)
        stages.append({"name": entry.stage_name, "start": start, "sources": usage})
        start, previous = entry.end_step, entry.totals
    return stages
