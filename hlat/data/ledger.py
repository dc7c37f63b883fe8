"""What has been read: tokens, documents and epochs by source, in all and in each stage.

The paper's Table III is such a ledger. It is computed from the streams' states, so it is as exact
as they are and does not depend on how many ranks there were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from hlat.data.rows import Point, States
from hlat.data.streams import NUM_FIELDS

_DOCUMENTS, _TOKENS = 0, 3
"""Places of `Cursor.document` and `Cursor.tokens` among its fields."""


class Entry(TypedDict):
    """What has been read from one source (JSON-able)."""

    tokens: int
    documents: int
    """Documents finished, empty ones included."""
    epochs: float
    """The same in passes over the source's training documents."""


@dataclass(frozen=True)
class Chapter:
    """A stage that is over, and what had been read when it ended."""

    name: str
    end: int
    """The step after its last one."""
    totals: NDArray[np.int64]
    """Documents and tokens since the run began, [sources, 2]."""

    def adapt(self, before: Sequence[str], now: Sequence[str], is_whole: bool) -> "Chapter":
        """The chapter of a loader with other sources, or with a part of the rows only.

        One rank takes over what all have read, the others nothing, so that the sum stays right.
        """
        adapted = np.zeros((len(now), 2), np.int64)
        for place, name in enumerate(now):
            if is_whole and name in before:
                adapted[place] = self.totals[before.index(name)]
        return Chapter(self.name, self.end, adapted)

    def to_json(self) -> list[Any]:
        """The fields in order."""
        return [self.name, self.end, self.totals.tolist()]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> "Chapter":
        """Read what `to_json` wrote."""
        name, end, totals = fields
        return cls(name, end, np.array(totals, np.int64).reshape(-1, 2))


def sum_chapters(parts: Sequence[Chapter]) -> Chapter:
    """The same chapter of several ranks as one."""
    summed: NDArray[np.int64] = np.sum([part.totals for part in parts], axis=0)
    return Chapter(parts[0].name, parts[0].end, summed)


def totals(states: States) -> NDArray[np.int64]:
    """Documents and tokens that some rows have read from every source, [sources, 2]."""
    cursors = states[:, 2:].reshape(len(states), -1, NUM_FIELDS)
    summed: NDArray[np.int64] = cursors[:, :, [_DOCUMENTS, _TOKENS]].sum(0)
    return summed


def entries(counts: NDArray[np.int64], documents_per_epoch: Mapping[str, int]) -> dict[str, Entry]:
    """Counts [sources, 2] by the sources' names."""
    return {
        name: Entry(tokens=int(tokens), documents=int(documents), epochs=int(documents) / size)
        for (name, size), (documents, tokens) in zip(
            documents_per_epoch.items(), counts, strict=True
        )
    }


def by_stage(
    chapters: Sequence[Chapter], point: Point, documents_per_epoch: Mapping[str, int]
) -> list[dict[str, Any]]:
    """What each stage has read from each source, the one under way included (JSON-able)."""
    now = Chapter(point.stage.name, point.step, totals(point.states))
    start, before = 0, np.zeros_like(now.totals)
    told = []
    for chapter in [*chapters, now]:
        read = entries(chapter.totals - before, documents_per_epoch)
        told.append({"name": chapter.name, "start": start, "sources": read})
        start, before = chapter.end, chapter.totals
    return told
