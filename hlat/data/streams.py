"""Streams: endless sequences of tokens, one per row of the global batch.

The order of data must not depend on how many ranks read it. So the unit of order is the stream, of
which there is a fixed number; a rank merely owns some. Where a stream stands is a document and a
token offset per source, never a buffer of tokens: its state is small, and to resume is to tokenise
again the documents that stand open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.data.mixture import Stage
from hlat.data.source import Source
from hlat.data.tokenizer import Tokenizer

SEGMENT_SEQUENCES = 4
"""Longest uninterrupted stretch of a document: what a giant may do to the mixture at once."""

Tokens = NDArray[np.int32]


@dataclass
class Cursor:
    """Where a stream stands in one source."""

    document: int = 0
    """Documents finished, empty ones included: the ordinal of the one that the stream is in."""
    offset: int = 0
    """Tokens of that document already emitted."""
    tokens: int = 0
    """Tokens emitted since the run began."""
    stage_tokens: int = 0
    """Tokens emitted since the stage began."""

    def to_json(self) -> list[int]:
        """The fields in order."""
        return [self.document, self.offset, self.tokens, self.stage_tokens]


class Stream:
    """One row of the global batch: stream i reads documents i, i+S, i+2S ... of each source.

    A stream emits the documents that it is supplied with, one segment after the other. A segment is
    a document, or a stretch of SEGMENT_SEQUENCES sequences of one that is longer, which then waits
    for its source's next turn.
    """

    def __init__(self, number: int, num_streams: int, names: Sequence[str], length: int) -> None:
        """Begin at the first document of every source.

        Args:
            number: The stream's row in the global batch.
            num_streams: Number S of streams.
            names: The sources' names.
            length: Tokens of a sequence.
        """
        self.number = number
        self.num_streams = num_streams
        self.cursors = {name: Cursor() for name in names}
        self._segment_tokens = SEGMENT_SEQUENCES * length
        self._stage: Stage | None = None
        self._source: str | None = None
        self._remaining = 0
        self._documents: dict[str, Tokens] = {}

    def begin(self, stage: Stage) -> None:
        """Begin the next sequence; where a stage begins with it, shares count anew from here."""
        if stage == self._stage:
            return
        self._stage = stage
        for cursor in self.cursors.values():
            cursor.stage_tokens = 0
        self._open_segment(stage.first_source((self.number + 0.5) / self.num_streams))

    def fill(self, row: Tokens, filled: int) -> int:
        """Write to row[filled:] until it is full or a document is wanted; return its tokens."""
        while filled < len(row):
            source = self._source or self._open_next_segment()
            document = self._documents.get(source)
            if document is None:
                break
            offset = self.cursors[source].offset
            count = min(len(row) - filled, self._remaining, len(document) - offset)
            row[filled : filled + count] = document[offset : offset + count]
            filled += count
            self._advance(source, count, len(document))
        return filled

    def wanted(self) -> tuple[str, int]:
        """Source and position in its training order of the document that the stream stands in."""
        assert self._source is not None
        ordinal = self.cursors[self._source].document
        return self._source, ordinal * self.num_streams + self.number

    def supply(self, document: Tokens) -> None:
        """Hand over the wanted document; after an empty one the next one is wanted."""
        assert self._source is not None
        if len(document):
            self._documents[self._source] = document
        else:
            self.cursors[self._source].document += 1

    def _open_segment(self, source: str) -> None:
        self._source = source
        self._remaining = self._segment_tokens

    def _open_next_segment(self) -> str:
        assert self._stage is not None
        tokens = {name: cursor.stage_tokens for name, cursor in self.cursors.items()}
        source = self._stage.next_source(tokens)
        self._open_segment(source)
        return source

    def _advance(self, source: str, count: int, length: int) -> None:
        cursor = self.cursors[source]
        cursor.offset += count
        cursor.tokens += count
        cursor.stage_tokens += count
        self._remaining -= count
        if cursor.offset == length:
            cursor.document += 1
            cursor.offset = 0
            del self._documents[source]
            self._source = None
        elif self._remaining == 0:
            self._source = None

    def state(self) -> dict[str, Any]:
        """Where the stream stands (JSON-able): the open segment, and a cursor per source."""
        cursors = {name: cursor.to_json() for name, cursor in self.cursors.items()}
        return {"segment": [self._source, self._remaining], "cursors": cursors}

    def restore(self, state: Mapping[str, Any], stage: Stage) -> None:
        """Stand where `state` was taken, in the stage that was under way."""
        self.cursors = {name: Cursor(*state["cursors"][name]) for name in self.cursors}
        self._source, self._remaining = state["segment"]
        self._stage = stage
        self._documents = {}


def next_sequences(
    streams: Sequence[Stream],
    stage: Stage,
    sources: Mapping[str, Source],
    tokenizer: Tokenizer,
    length: int,
) -> Tokens:
    """Draw one sequence from each stream; documents that several want are tokenised in one call.

    Args:
        streams: The streams, one per row.
        stage: The stage of this step.
        sources: All sources by name.
        tokenizer: What turns their documents into tokens.
        length: Tokens of a sequence.

    Returns:
        Token ids [len(streams), length].
    """
    batch = np.empty((len(streams), length), np.int32)
    filled = [0] * len(streams)
    for stream in streams:
        stream.begin(stage)
    unfinished = list(range(len(streams)))
    while True:
        for row in unfinished:
            filled[row] = streams[row].fill(batch[row], filled[row])
        unfinished = [row for row in unfinished if filled[row] < length]
        if not unfinished:
            return batch
        wanted = [streams[row].wanted() for row in unfinished]
        texts = [sources[name].training_text(position) for name, position in wanted]
        for row, document in zip(unfinished, tokenizer.encode(texts), strict=True):
            streams[row].supply(document)
