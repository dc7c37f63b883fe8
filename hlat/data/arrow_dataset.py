"""Random access to the documents in many memory-mapped Arrow files.

A run reads single documents in random order from files larger than memory. A document is a slice of
the mapped file at a position computed from the row index (row_index.py): opening billions of rows
reads one index per file, and one row needs two binary searches.
"""

import hashlib
import logging
import struct
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.data import arrow_conversion, row_index, text_column
from hlat.data.arrow_conversion import IndexedFile
from hlat.data.file_content import FileContent
from hlat.storage.data_file import DataFile

NUM_SAMPLED_ROWS = 16
"""Rows whose text is part of a fingerprint, besides the name, rows and text bytes of each file."""
MAX_CHECKED_DOCUMENTS = 256
"""Documents whose checksum is compared at a checkpoint, besides the first one of each file."""
MAX_UNREADABLE_FILES = 5
"""Unreadable files to report before indexing stops."""

_LOG = logging.getLogger("hlat.data")
_ENTRY_STRUCT = struct.Struct(f"<{len(row_index.BATCH_DTYPE.descr)}q")
_OFFSET_STRUCTS = {4: struct.Struct("<ii"), 8: struct.Struct("<qq")}
_EMPTY = memoryview(b"")


class _ArrowFile:
    """The rows of one file, mapped on first use."""

    def __init__(self, file: DataFile, indexed: IndexedFile, column: str, config_key: str) -> None:
        self.file = file
        index = indexed.row_index
        self.num_rows = int(index["rows"].sum())
        self.num_bytes = int(index["num_bytes"].sum())
        self._indexed, self._column, self._config_key = indexed, column, config_key
        self._content = FileContent(indexed.path)
        # Memoryviews, because access to one NumPy element is several times slower
        self._row_ends = np.cumsum(index["rows"]).data
        self._index = index.view(np.uint8).data
        self._warned = False

    @cached_property
    def _mapped_bytes(self) -> memoryview:
        path, index, sidecar = self._indexed
        try:
            mapped = row_index.map_file(path)
        except (OSError, pa.ArrowException) as error:
            raise text_column.build_damaged_file_error(path, error) from error
        self._content.validate_status()  # the index is of this size
        if sidecar is not None:
            row_index.validate_sidecar(sidecar, index, self.file, self._column, self._config_key)
        return memoryview(mapped).cast("B")

    def validate_content(self, num_samples: int) -> None:
        """Raise ConfigError if the file, or one of `num_samples` documents read before, changed."""
        self._content.validate_status()
        self._content.validate_samples(num_samples)

    def read_row(self, row: int) -> memoryview:
        batch = bisect_right(self._row_ends, row)
        rows, validity, offsets, width, text, text_bytes, _ = _ENTRY_STRUCT.unpack_from(
            self._index, batch * _ENTRY_STRUCT.size
        )
        row_in_batch: int = row - self._row_ends[batch] + rows
        mapped = self._mapped_bytes
        content = self._content
        if time.monotonic() >= content.next_check_s:
            content.validate_status()
        if validity >= 0 and not mapped[validity + (row_in_batch >> 3)] >> (row_in_batch & 7) & 1:
            return _EMPTY
        start, stop = _OFFSET_STRUCTS[width].unpack_from(mapped, offsets + row_in_batch * width)
        if not 0 <= start <= stop <= text_bytes:
            self._warn_damaged(row)
            return _EMPTY
        document = mapped[text + start : text + stop]
        if content.needs_samples:
            content.add_sample(text + start, document)
        return document

    def _warn_damaged(self, row: int) -> None:
        """Log the first damaged row of the file; an error would end the run."""
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "%s is damaged: row %d lies outside of its buffer and is read as an empty "
                "document, as will be others like it; write the file again",
                self.file.location,
                row,
            )


class ArrowDataset:
    """The documents of one source, numbered over all of its files in order."""

    def __init__(
        self,
        files: Sequence[Path | DataFile],
        column: str,
        config_key: str = text_column.CONFIG_KEY,
    ) -> None:
        """Open files with their row indices, and first convert those that cannot be mapped.

        Raises:
            ConfigError: If a file is missing or damaged, or lacks the column.
        """
        self._column = column
        self._files = _open_files([_build_data_file(file) for file in files], column, config_key)
        self._row_ends = list(accumulate(file.num_rows for file in self._files))
        self._row_starts = [0, *self._row_ends[:-1]]
        self._num_rows = self._row_ends[-1] if self._row_ends else 0

    def __len__(self) -> int:
        """Return the number of rows, including empty documents."""
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(file.num_bytes for file in self._files)

    def read_document(self, row: int) -> memoryview:
        """Return the bytes of the document in a row without UTF-8 validation; empty for a null.

        A row with offsets outside its buffer is empty too, and logged once per file.

        Raises:
            ConfigError: If the file is missing or has changed.
        """
        assert 0 <= row < self._num_rows
        number = bisect_right(self._row_ends, row)
        return self._files[number].read_row(row - self._row_starts[number])

    def read_text(self, row: int) -> str:
        """Return the document in a row as text, with U+FFFD in place of invalid UTF-8."""
        return str(self.read_document(row), "utf-8", "replace")

    def validate_content(self, shard: int = 0, num_shards: int = 1) -> None:
        """Compare the files of a shard with their state when they were opened.

        Compares size, modification time, and checksums of up to MAX_CHECKED_DOCUMENTS documents, or
        one per file.

        Raises:
            ConfigError: If a file is missing or has changed.
        """
        files = self._files[shard::num_shards]
        for file in files:
            file.validate_content(max(1, MAX_CHECKED_DOCUMENTS // len(files)))

    def sample_documents(self) -> Iterator[memoryview]:
        """Yield up to NUM_SAMPLED_ROWS evenly spaced documents."""
        count = min(NUM_SAMPLED_ROWS, len(self))
        rows = np.linspace(0, len(self) - 1, count).astype(np.int64).tolist()
        return map(self.read_document, rows)

    def compute_fingerprint(self) -> dict[str, Any]:
        """Return the number of files, the number of rows and a sha256 of the documents.

        It does not depend on record batch sizes or compression.
        """
        return {"files": len(self._files), "rows": len(self), "sha256": self._sha256}

    @cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256(f"column {self._column}\n".encode())
        for file in self._files:
            text = f"file {file.file.name} {file.num_bytes} {file.num_rows}\n"
            digest.update(text.encode("utf-8", "surrogateescape"))  # a name may not be UTF-8
        for document in self.sample_documents():
            digest.update(hashlib.sha256(document).digest())
        return digest.hexdigest()


def _build_data_file(file: Path | DataFile) -> DataFile:
    if isinstance(file, DataFile):
        return file
    try:
        return DataFile.from_path(file)
    except OSError as error:
        raise text_column.build_damaged_file_error(file, error) from error


def _open_files(files: Sequence[DataFile], column: str, config_key: str) -> list[_ArrowFile]:
    indexed = {file: _find_indexed_file(file, column) for file in files}
    new = [file for file, result in indexed.items() if result is None]
    indexed.update(_index_files([file for file in new if not file.is_remote], column, config_key))
    if unmapped := [file for file in new if indexed[file] is None]:
        indexed.update(arrow_conversion.convert_files(unmapped, column, config_key))
    return [
        _ArrowFile(file, result, column, config_key)
        for file, result in indexed.items()
        if result is not None
    ]


def _find_indexed_file(file: DataFile, column: str) -> IndexedFile | None:
    """Return the file itself or its conversion if an index exists."""
    if not file.is_remote:
        found = row_index.find_row_index(file, column)
        if found is not None:
            return IndexedFile(Path(file.location), *found)
    return arrow_conversion.find_converted_file(file, column)


def _index_files(
    files: Sequence[DataFile], column: str, config_key: str
) -> dict[DataFile, IndexedFile]:
    """Index the files that can be mapped."""
    indexed: dict[DataFile, IndexedFile] = {}
    problems: list[str] = []
    interactive = sys.stderr.isatty()
    for file in tqdm(files, "indexing rows", unit="file", disable=not interactive, leave=False):
        try:
            index = row_index.build_row_index(Path(file.location), column, config_key)
        except row_index.CannotMapError:
            continue
        except ConfigError as error:
            problems += error.problems
        else:
            row_index.cache_row_index(index, file, column)
            indexed[file] = IndexedFile(Path(file.location), index)
        if len(problems) >= MAX_UNREADABLE_FILES:
            break
    raise_config_errors(problems)
    return indexed
