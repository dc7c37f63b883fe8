"""Token streams: one endless sequence of tokens per row of the global batch.

The order of the data is independent of the number of ranks, because the number of streams is fixed
and each rank reads some of them. The state of a stream is a document, a chunk of it and a token
offset per source: a few integers. A resume tokenizes the open chunks again.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError
from hlat.data.data_mixture import MixtureStage
from hlat.data.data_source import DataSource
from hlat.data.tokenizer import Tokenizer

MAX_SEGMENT_SEQUENCES = 4
"""Sequences after which a long document is interrupted by other sources. It limits the effect of
the longest document on the mixture."""
CHUNK_BYTES = 1 << 16
"""Approximate size of a segment. It limits the memory of an interrupted document, and the text that
a resume tokenizes again."""

TokenArray = NDArray[np.int32]

_LOG = logging.getLogger("hlat.data")


@dataclass
class SourceCursor:
    """Position of a stream in one source."""

    document: int = 0
    """Number of finished documents, including empty ones, and index of the open document."""
    chunk_start: int = 0
    """Byte of the open document at which the open chunk starts."""
    token_offset: int = 0
    """Tokens of the open chunk already emitted."""
    tokens: int = 0
    """Tokens emitted since the start of the run."""
    stage_tokens: int = 0
    """Tokens emitted since the start of the stage."""


NUM_CURSOR_FIELDS = len(fields(SourceCursor))


class ChunkLocation(NamedTuple):
    """Location of a document chunk."""

    source: str
    position: int
    """Position of the document in the training order of its source."""
    start: int
    """Byte of the document at which the chunk starts."""


class TokenizedChunk(NamedTuple):
    """Tokens of a document chunk, with an optional BOS before the first and EOS after the last."""

    tokens: TokenArray
    next_chunk_start: int
    """Byte at which the next chunk starts; 0 after the last chunk."""


class TokenStream:
    """One row of the global batch: stream i reads documents i, i+S, i+2S ... of each source.

    A stream emits segments. A segment is the rest of a document, or MAX_SEGMENT_SEQUENCES sequences
    of a longer document, which continues on the next turn of its source. A document is interrupted
    only at the end of a sequence, so within a sequence every document starts after an EOS.
    """

    def __init__(
        self, index: int, num_streams: int, source_names: Sequence[str], sequence_length: int
    ) -> None:
        """Create a stream positioned at the first document of every source."""
        self.index = index
        self.num_streams = num_streams
        self.cursors = {name: SourceCursor() for name in source_names}
        self._source_names = list(source_names)
        self._max_segment_tokens = MAX_SEGMENT_SEQUENCES * sequence_length
        self._stage: MixtureStage | None = None
        self._source: str | None = None
        self._remaining_sequences = 0
        self._chunks: dict[str, TokenizedChunk] = {}
        self.num_empty_documents = 0
        """Number of consecutive documents without tokens."""

    def begin_sequence(self, stage: MixtureStage) -> None:
        """Start the next sequence; a new stage resets the token counts of the mixture."""
        if stage == self._stage:
            return
        self._stage = stage
        for cursor in self.cursors.values():
            cursor.stage_tokens = 0
        self._open_segment(stage.select_first_source((self.index + 0.5) / self.num_streams))

    def fill_row(self, row: TokenArray, num_filled: int) -> int:
        """Write to row[num_filled:] until it is full or a chunk is missing.

        Returns:
            The new number of tokens in the row.
        """
        while num_filled < len(row):
            source = self._source or self._open_next_segment()
            chunk = self._chunks.get(source)
            if chunk is None:
                break
            offset = self.cursors[source].token_offset
            assert offset < len(chunk.tokens), "the fingerprint guarantees equal documents"
            count = min(len(row) - num_filled, len(chunk.tokens) - offset)
            row[num_filled : num_filled + count] = chunk.tokens[offset : offset + count]
            num_filled += count
            self._advance(source, count, chunk)
        if num_filled == len(row):
            self._remaining_sequences -= 1
            if self._remaining_sequences == 0:
                self._source = None
        return num_filled

    def get_required_chunk(self) -> ChunkLocation:
        """Return the location of the missing chunk."""
        assert self._source is not None
        cursor = self.cursors[self._source]
        position = cursor.document * self.num_streams + self.index
        return ChunkLocation(self._source, position, cursor.chunk_start)

    def add_chunk(self, chunk: TokenizedChunk) -> None:
        """Add the missing chunk, or move to the next one if it has no tokens."""
        assert self._source is not None
        if len(chunk.tokens):
            self._chunks[self._source] = chunk
            self.num_empty_documents = 0
        else:
            self._close_chunk(self._source, chunk.next_chunk_start)
            self.num_empty_documents += 1

    def _open_segment(self, source: str) -> None:
        self._source = source
        self._remaining_sequences = MAX_SEGMENT_SEQUENCES

    def _open_next_segment(self) -> str:
        assert self._stage is not None
        tokens = {name: cursor.stage_tokens for name, cursor in self.cursors.items()}
        source = self._stage.select_next_source(tokens, self._max_segment_tokens)
        self._open_segment(source)
        return source

    def _advance(self, source: str, count: int, chunk: TokenizedChunk) -> None:
        cursor = self.cursors[source]
        cursor.token_offset += count
        cursor.tokens += count
        cursor.stage_tokens += count
        if cursor.token_offset == len(chunk.tokens):
            self._close_chunk(source, chunk.next_chunk_start)
            if chunk.next_chunk_start == 0:
                self._source = None

    def _close_chunk(self, source: str, next_chunk_start: int) -> None:
        """Move the cursor to the next chunk, or to the next document if that is 0."""
        cursor = self.cursors[source]
        cursor.document += next_chunk_start == 0
        cursor.chunk_start = next_chunk_start
        cursor.token_offset = 0
        self._chunks.pop(source, None)

    def get_state(self) -> list[int]:
        """Return the position of the stream.

        Returns:
            Index of the source of the open segment (-1: none), remaining sequences of the segment,
            and the fields of every source's cursor.
        """
        source = -1 if self._source is None else self._source_names.index(self._source)
        state = [source, self._remaining_sequences]
        for name in self._source_names:
            state += vars(self.cursors[name]).values()
        return state

    def restore(self, state: Sequence[int], stage: MixtureStage) -> None:
        """Set the position to a state of `get_state` and its stage."""
        source, self._remaining_sequences, *values = state
        self._source = None if source < 0 else self._source_names[source]
        for i, name in enumerate(self._source_names):
            start = i * NUM_CURSOR_FIELDS
            self.cursors[name] = SourceCursor(*values[start : start + NUM_CURSOR_FIELDS])
        self._stage = stage
        self._chunks = {}


def read_next_sequences(
    streams: Sequence[TokenStream],
    stage: MixtureStage,
    sources: Mapping[str, DataSource],
    tokenizer: Tokenizer,
    sequence_length: int,
) -> TokenArray:
    """Read one sequence from each stream, tokenizing the chunks of all streams in one call.

    Returns:
        Token ids [len(streams), sequence_length].
    """
    batch = np.empty((len(streams), sequence_length), np.int32)
    num_filled = [0] * len(streams)
    for stream in streams:
        stream.begin_sequence(stage)
    unfinished = list(range(len(streams)))
    while True:
        for row in unfinished:
            num_filled[row] = streams[row].fill_row(batch[row], num_filled[row])
        unfinished = [row for row in unfinished if num_filled[row] < sequence_length]
        if not unfinished:
            return batch
        locations = [streams[row].get_required_chunk() for row in unfinished]
        chunks = _tokenize_chunks(locations, streams[0].num_streams, sources, tokenizer)
        for row, location, chunk in zip(unfinished, locations, chunks, strict=True):
            streams[row].add_chunk(chunk)
            _validate_not_empty(streams[row], sources[location.source])


def _validate_not_empty(stream: TokenStream, source: DataSource) -> None:
    # The probability of an error for a source with one non-empty document is e^-50
    if stream.num_empty_documents > 50 * source.num_training_documents:
        raise ConfigError(
            f"data.sources.{source.name}: {stream.num_empty_documents} documents in a row have no "
            "token; set data.text_column to the column that holds the documents, or take the "
            "source out"
        )


def _tokenize_chunks(
    locations: Sequence[ChunkLocation],
    stride: int,
    sources: Mapping[str, DataSource],
    tokenizer: Tokenizer,
) -> list[TokenizedChunk]:
    texts, next_starts = [], []
    for name, position, start in locations:
        document = sources[name].read_training_document(position, stride)
        end = tokenizer.chunker.find_chunk_end(document, start, CHUNK_BYTES)
        first, last = tokenizer.chunker.get_encoded_range(start, end)
        texts.append(_decode_utf8(name, document[first:last]))
        next_starts.append(end if end < len(document) else 0)
    encoded = zip(locations, tokenizer.encode_chunks(texts), next_starts, strict=True)
    return [
        TokenizedChunk(
            tokenizer.add_delimiters(ids, not start, not next_start)
            if ids.size or start or next_start
            else ids,  # an empty document has no delimiters
            next_start,
        )
        for (_, _, start), ids, next_start in encoded
    ]


def _decode_utf8(source: str, data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        _warn_invalid_utf8(source)
        return str(data, "utf-8", "replace")


@functools.cache
def _warn_invalid_utf8(source: str) -> None:
    _LOG.warning(
        "data.sources.%s: documents hold bytes that are not UTF-8; each reads as U+FFFD", source
    )
