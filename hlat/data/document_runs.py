"""Runs of documents that a token stream reads and tokenizes at once.

Python needs several microseconds per document and call, and the fast encoder about five for a
kilobyte. A stream therefore reads the documents of a sequence together.
"""

import functools
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlat.data.data_source import DataSource
from hlat.data.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 16
"""Approximate size of a chunk of a long document, and limit of the documents that are read ahead.
It limits the memory of an interrupted source, and the text that a resume tokenizes again."""
MAX_RUN_DOCUMENTS = 64
"""Limit of the documents of a run, which may be empty."""
BYTES_PER_TOKEN = 4
"""Bytes of text that are read for each missing token. An error costs time only: tokens of the same
run follow in the next sequence, and a second run completes this one."""

TokenArray = NDArray[np.int32]

_LOG = logging.getLogger("hlat.data")


class RunLocation(NamedTuple):
    """Location of the first document of a run, and the number of tokens that a stream needs."""

    source: str
    position: int
    """Position of the document in the training order of its source."""
    start: int
    """Byte of the document at which its next chunk starts."""
    num_tokens: int


class DocumentRun:
    """Tokens of consecutive documents of a stream, or of one chunk of a long document.

    Documents have an optional BOS before the first token and EOS after the last, and no token if
    they are empty.
    """

    def __init__(self, tokens: TokenArray, ends: list[int], next_chunk_start: int) -> None:
        """Create a run at its first token.

        Args:
            tokens: Tokens of all documents.
            ends: Number of tokens before the end of each document.
            next_chunk_start: Byte of the only document at which its next chunk starts; 0 if all
                documents are complete.
        """
        self.next_chunk_start = next_chunk_start
        self._tokens = tokens
        self._ends = ends
        self._position = 0
        self._num_finished = 0

    def skip_tokens(self, count: int) -> None:
        """Move to a token of the first document."""
        assert count == 0 or count < self._ends[0], "the fingerprint guarantees equal documents"
        self._position = count

    def skip_empty_documents(self) -> int:
        """Move to the next document with tokens, and return the number of those before it."""
        before = self._num_finished
        self._num_finished = bisect_right(self._ends, self._position, before)
        return self._num_finished - before

    @property
    def is_finished(self) -> bool:
        """True after the last document."""
        return self._num_finished == len(self._ends)

    @property
    def document_offset(self) -> int:
        """Tokens of the current document that were read."""
        start = self._ends[self._num_finished - 1] if self._num_finished else 0
        return self._position - start

    def read(self, row: TokenArray, one_document: bool) -> tuple[int, int]:
        """Write tokens to a row, until it is full or the run ends, or the document.

        Returns:
            The number of tokens, and of documents that end with one of them.
        """
        start, before = self._position, self._num_finished
        end = min(start + len(row), self._ends[before if one_document else -1])
        row[: end - start] = self._tokens[start:end]
        # Empty documents at the end belong to the next call
        last = bisect_left(self._ends, end, before)
        self._num_finished = last + (self._ends[last] == end)
        self._position = end
        return end - start, self._num_finished - before


def tokenize_runs(
    locations: Sequence[RunLocation],
    stride: int,
    sources: Mapping[str, DataSource],
    tokenizer: Tokenizer,
) -> list[DocumentRun]:
    """Return the run at each location, encoding the texts of all of them in one call."""
    texts: list[str] = []
    ends, next_starts = [], []
    for location in locations:
        next_starts.append(_read_texts(location, stride, sources, tokenizer, texts))
        ends.append(len(texts))
    ids, runs, start = tokenizer.encode_chunks(texts), [], 0
    for location, end, next_start in zip(locations, ends, next_starts, strict=True):
        is_first, is_last = not location.start, not next_start
        joined = tokenizer.join_documents(ids[start:end], is_first, is_last)
        runs.append(DocumentRun(*joined, next_start))
        start = end
    return runs


def _read_texts(
    location: RunLocation,
    stride: int,
    sources: Mapping[str, DataSource],
    tokenizer: Tokenizer,
    texts: list[str],
) -> int:
    """Append the texts of a run, and return the start of the next chunk or 0."""
    name, position, start, num_tokens = location
    documents = sources[name].iter_training_documents(position, stride)
    document = next(documents)
    if start or len(document) > CHUNK_BYTES:
        end = tokenizer.chunker.find_chunk_end(document, start, CHUNK_BYTES)
        first, last = tokenizer.chunker.get_encoded_range(start, end)
        texts.append(_decode_utf8(name, document[first:last]))
        return end if end < len(document) else 0
    num_bytes = min(CHUNK_BYTES, BYTES_PER_TOKEN * num_tokens)
    max_texts = len(texts) + MAX_RUN_DOCUMENTS
    while True:
        texts.append(_decode_utf8(name, document))
        num_bytes -= len(document)
        if num_bytes <= 0 or len(texts) == max_texts:
            return 0
        document = next(documents)
        if len(document) > CHUNK_BYTES:
            return 0


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
