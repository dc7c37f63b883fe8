"""Streams: endless sequences of tokens, one per row of the global batch.

The order of data must not depend on how many ranks read it. So the unit of order is the stream, of
which there is a fixed number; a rank merely owns some. Where a stream stands is a document, a piece
of it and a token offset per source, never a buffer of tokens: its state is a few integers, and to
resume is to tokenise again the pieces that stand open.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlat.config.errors import ConfigError
from hlat.data.mixture import Stage
from hlat.data.source import Source
from hlat.data.tokenizer import Tokenizer

SEGMENT_SEQUENCES = 4
"""Sequences after which a document that goes on gives way to other sources: what a giant may do to
the mixture at once."""
PIECE_BYTES = 1 << 16
"""About a segment: what a parked document keeps in memory, and what a resume tokenises again."""

Tokens = NDArray[np.int32]

_log = logging.getLogger("hlat.data")


@dataclass
class Cursor:
    """Where a stream stands in one source."""

    document: int = 0
    """Documents finished, empty ones included: the ordinal of the one that the stream is in."""
    piece: int = 0
    """Byte of that document at which the piece begins that the stream is in."""
    offset: int = 0
    """Tokens of that piece already emitted."""
    tokens: int = 0
    """Tokens emitted since the run began."""
    stage_tokens: int = 0
    """Tokens emitted since the stage began."""


NUM_FIELDS = len(fields(Cursor))


class Place(NamedTuple):
    """A piece of a document."""

    source: str
    position: int
    """The document's, in the training order of its source."""
    start: int
    """Byte of the document at which the piece begins."""


class Piece(NamedTuple):
    """The tokens of a piece, with eos if the document ends with it."""

    tokens: Tokens
    end: int
    """Byte at which the next piece begins; 0: the document ends with this one."""


class Stream:
    """One row of the global batch: stream i reads documents i, i+S, i+2S ... of each source.

    A stream emits the documents that it is supplied with, one segment after the other. A segment is
    a document or what is left of one, or a stretch of at most SEGMENT_SEQUENCES sequences of one
    that is longer, which then waits for its source's next turn. It is interrupted where a sequence
    ends and nowhere else, so within a sequence every document that begins follows an eos.
    """

    def __init__(self, number: int, num_streams: int, names: Sequence[str], length: int) -> None:
        """Begin at the first document of every source.

        Args:
            number: The stream's row in the global batch.
            num_streams: Number S of streams.
            names: The sources' names in alphabetical order.
            length: Tokens of a sequence.
        """
        self.number = number
        self.num_streams = num_streams
        self.cursors = {name: Cursor() for name in names}
        self._names = list(names)
        self._most_tokens = SEGMENT_SEQUENCES * length
        self._stage: Stage | None = None
        self._source: str | None = None
        self._remaining = 0
        self._pieces: dict[str, Piece] = {}
        self.num_barren = 0
        """Documents in a row, up to now, that had no token."""

    def begin(self, stage: Stage) -> None:
        """Begin the next sequence; where a stage begins with it, shares count anew from here."""
        if stage == self._stage:
            return
        self._stage = stage
        for cursor in self.cursors.values():
            cursor.stage_tokens = 0
        self._open_segment(stage.first_source((self.number + 0.5) / self.num_streams))

    def fill(self, row: Tokens, filled: int) -> int:
        """Write to row[filled:] until it is full or a piece is wanted; return its tokens."""
        while filled < len(row):
            source = self._source or self._open_next_segment()
            piece = self._pieces.get(source)
            if piece is None:
                break
            offset = self.cursors[source].offset
            assert offset < len(piece.tokens), "the fingerprint refuses other documents"
            count = min(len(row) - filled, len(piece.tokens) - offset)
            row[filled : filled + count] = piece.tokens[offset : offset + count]
            filled += count
            self._advance(source, count, piece)
        if filled == len(row):
            self._end_sequence()
        return filled

    def wanted(self) -> Place:
        """The piece that the stream stands in."""
        assert self._source is not None
        cursor = self.cursors[self._source]
        return Place(self._source, cursor.document * self.num_streams + self.number, cursor.piece)

    def supply(self, piece: Piece) -> None:
        """Hand over the wanted piece; after one without tokens the next one is wanted."""
        assert self._source is not None
        if len(piece.tokens):
            self._pieces[self._source] = piece
            self.num_barren = 0
        else:
            self._leave(self._source, piece.end)
            self.num_barren += 1

    def _open_segment(self, source: str) -> None:
        self._source = source
        self._remaining = SEGMENT_SEQUENCES

    def _open_next_segment(self) -> str:
        assert self._stage is not None
        tokens = {name: cursor.stage_tokens for name, cursor in self.cursors.items()}
        source = self._stage.next_source(tokens, self._most_tokens)
        self._open_segment(source)
        return source

    def _end_sequence(self) -> None:
        self._remaining -= 1
        if self._remaining == 0:
            self._source = None

    def _advance(self, source: str, count: int, piece: Piece) -> None:
        cursor = self.cursors[source]
        cursor.offset += count
        cursor.tokens += count
        cursor.stage_tokens += count
        if cursor.offset == len(piece.tokens):
            self._leave(source, piece.end)
            if piece.end == 0:
                self._source = None

    def _leave(self, source: str, end: int) -> None:
        """Stand before the next piece, or the next document where `end` is 0."""
        cursor = self.cursors[source]
        cursor.document += end == 0
        cursor.piece = end
        cursor.offset = 0
        self._pieces.pop(source, None)

    def state(self) -> list[int]:
        """Where the stream stands.

        Returns:
            Index of the source of the open segment (-1: none), sequences left to it, and the
            fields of every source's cursor.
        """
        source = -1 if self._source is None else self._names.index(self._source)
        state = [source, self._remaining]
        for name in self._names:
            state += vars(self.cursors[name]).values()
        return state

    def restore(self, state: Sequence[int], stage: Stage) -> None:
        """Stand where `state` was taken, in the stage that was under way."""
        source, self._remaining, *numbers = state
        self._source = None if source < 0 else self._names[source]
        for i, name in enumerate(self._names):
            self.cursors[name] = Cursor(*numbers[i * NUM_FIELDS : (i + 1) * NUM_FIELDS])
        self._stage = stage
        self._pieces = {}


def next_sequences(
    streams: Sequence[Stream],
    stage: Stage,
    sources: Mapping[str, Source],
    tokenizer: Tokenizer,
    length: int,
) -> Tokens:
    """Draw one sequence from each stream; pieces that several want are tokenised in one call.

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
        pieces = _read(wanted, streams[0].num_streams, sources, tokenizer)
        for row, place, piece in zip(unfinished, wanted, pieces, strict=True):
            streams[row].supply(piece)
            _refuse_barren(streams[row], sources[place.source])


def _refuse_barren(stream: Stream, source: Source) -> None:
    # A source with one document that has tokens passes for none once in e^50 times
    if stream.num_barren > 50 * source.num_training:
        raise ConfigError(
            f"data.sources.{source.name}: {stream.num_barren} documents in a row have no token; "
            "set data.text_column to the column that holds the documents, or take the source out"
        )


def _read(
    places: Sequence[Place], stride: int, sources: Mapping[str, Source], tokenizer: Tokenizer
) -> list[Piece]:
    texts, ends = [], []
    for name, position, start in places:
        document = sources[name].training_document(position, stride)
        end = tokenizer.cuts.end(document, start, PIECE_BYTES)
        texts.append(_decode(name, document, *tokenizer.cuts.range(start, end)))
        ends.append(end if end < len(document) else 0)
    tokens = tokenizer.encode_pieces(texts)
    return [
        Piece(tokenizer.end(ids) if end == 0 and (place.start or len(ids)) else ids, end)
        for place, ids, end in zip(places, tokens, ends, strict=True)
    ]


def _decode(source: str, document: memoryview, start: int, end: int) -> str:
    try:
        return str(document[start:end], "utf-8")
    except UnicodeDecodeError:
        _tell_of_invalid(source)
        return str(document[start:end], "utf-8", "replace")


@functools.cache
def _tell_of_invalid(source: str) -> None:
    _log.warning(
        "data.sources.%s: documents hold bytes that are not UTF-8; each reads as U+FFFD", source
    )
