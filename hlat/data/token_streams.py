"""Token streams: documents packed into sequences of fixed length, one stream per row of a batch.

The order of the data is independent of the number of ranks, because the number of streams is fixed
and each rank reads some of them. The state of a stream is a document, a chunk of it and a token
offset per source: a few integers. A resume tokenizes the open chunks again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.data.data_mixture import MixtureStage
from hlat.data.data_source import DataSource
from hlat.data.document_runs import DocumentRun, RunLocation, TokenArray, tokenize_runs
from hlat.data.tokenizer import Tokenizer

MAX_SEGMENT_SEQUENCES = 4
"""Sequences after which a long document is interrupted by other sources. It limits the effect of
the longest document on the mixture."""


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
        self._runs: dict[str, DocumentRun] = {}
        self.num_empty_documents = 0
        """Number of consecutive documents without tokens."""

    def begin_sequence(self, stage: MixtureStage) -> None:
        """Start the next sequence; a new stage resets the token counts of the mixture."""
        if stage is self._stage or stage == self._stage:  # identity takes a tenth of the time
            return
        self._stage = stage
        for cursor in self.cursors.values():
            cursor.stage_tokens = 0
        self._open_segment(stage.select_first_source((self.index + 0.5) / self.num_streams))

    def fill_row(self, row: TokenArray, num_filled: int) -> int:
        """Write to row[num_filled:] until it is full or a run of documents is missing.

        Returns:
            The new number of tokens in the row.
        """
        while num_filled < len(row):
            source = self._source or self._open_next_segment()
            run = self._find_run_with_tokens(source)
            if run is None:
                return num_filled
            num_filled += self._read_run(source, run, row[num_filled:])
        self._remaining_sequences -= 1
        if self._remaining_sequences == 0:
            self._source = None
        return num_filled

    def get_required_run(self, num_tokens: int) -> RunLocation:
        """Return the location of the missing run, of about `num_tokens` tokens."""
        assert self._source is not None
        cursor = self.cursors[self._source]
        position = cursor.document * self.num_streams + self.index
        return RunLocation(self._source, position, cursor.chunk_start, num_tokens)

    def add_run(self, run: DocumentRun) -> None:
        """Add the missing run."""
        assert self._source is not None
        run.skip_tokens(self.cursors[self._source].token_offset)
        self._runs[self._source] = run

    def _open_segment(self, source: str) -> None:
        self._source = source
        self._remaining_sequences = MAX_SEGMENT_SEQUENCES

    def _open_next_segment(self) -> str:
        assert self._stage is not None
        source = self._stage.only_source
        if source is None:
            tokens = {name: cursor.stage_tokens for name, cursor in self.cursors.items()}
            source = self._stage.select_next_source(tokens, self._max_segment_tokens)
        self._open_segment(source)
        return source

    def _find_run_with_tokens(self, source: str) -> DocumentRun | None:
        """Skip empty documents, and return the run of the source unless it is finished."""
        run = self._runs.get(source)
        if run is None:
            return None
        num_empty = run.skip_empty_documents()
        if num_empty:
            self.num_empty_documents += num_empty
            self._finish_documents(source, num_empty, run)
        return None if run.is_finished else run

    def _read_run(self, source: str, run: DocumentRun, row: TokenArray) -> int:
        """Write tokens of one document to a row, or of several in a stage of one source."""
        assert self._stage is not None
        cursor = self.cursors[source]
        count, num_finished = run.read(row, one_document=self._stage.only_source is None)
        self.num_empty_documents = 0
        cursor.tokens += count
        cursor.stage_tokens += count
        if num_finished:
            self._finish_documents(source, num_finished, run)
        cursor.token_offset = run.document_offset
        # Each document of the run starts a segment
        if num_finished > 1 or (num_finished and cursor.token_offset):
            self._open_segment(source)
        if num_finished and not (cursor.token_offset or cursor.chunk_start):
            self._source = None
        return count

    def _finish_documents(self, source: str, count: int, run: DocumentRun) -> None:
        """Move the cursor to the next document, or to the next chunk of the last one."""
        cursor = self.cursors[source]
        cursor.chunk_start, cursor.token_offset = 0, 0
        if run.is_finished:
            del self._runs[source]
            cursor.chunk_start = run.next_chunk_start
        cursor.document += count - (cursor.chunk_start > 0)

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
        self._runs = {}


def read_next_sequences(
    streams: Sequence[TokenStream],
    stage: MixtureStage,
    sources: Mapping[str, DataSource],
    tokenizer: Tokenizer,
    sequence_length: int,
) -> TokenArray:
    """Read one sequence from each stream, tokenizing the documents of all streams in one call.

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
        locations = []
        for row in unfinished:
            location = streams[row].get_required_run(sequence_length - num_filled[row])
            _validate_not_empty(streams[row], sources[location.source])
            locations.append(location)
        runs = tokenize_runs(locations, streams[0].num_streams, sources, tokenizer)
        for row, run in zip(unfinished, runs, strict=True):
            streams[row].add_run(run)


def _validate_not_empty(stream: TokenStream, source: DataSource) -> None:
    # The probability of an error for a source with one non-empty document is e^-50
    if stream.num_empty_documents > 50 * source.num_training_documents:
        raise ConfigError(
            f"data.sources.{source.name}: {stream.num_empty_documents} documents in a row have no "
            "token; set data.text_column to the column that holds the documents, or take the "
            "source out"
        )
