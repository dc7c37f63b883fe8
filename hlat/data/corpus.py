"""Rows of text over many memory-mapped Arrow files.

A run reads documents in random order, one at a time, out of files larger than memory. A row is
therefore a slice of the mapped file, found by arithmetic on positions that were worked out once:
opening billions of rows costs a look at each file's index, and reading one costs two searches.
"""

import hashlib
import logging
import struct
import sys
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tqdm import tqdm

from hlat.config.errors import ConfigError
from hlat.data import row_index, staging, text_column
from hlat.data.data_file import DataFile
from hlat.data.staging import Place

NUM_SAMPLED_ROWS = 16
"""Rows whose text enters a fingerprint, besides every file's name, rows and bytes of text."""
MAX_PROBLEMS = 5
"""Files that are told to be unreadable before the rest is left untried."""

_LOG = logging.getLogger("hlat.data")
_ENTRY = struct.Struct(f"<{len(row_index.BATCH.descr)}q")
_OFFSETS = {4: struct.Struct("<ii"), 8: struct.Struct("<qq")}
_EMPTY = memoryview(b"")


class _File:
    """The rows of one file, mapped when the first of them is read."""

    def __init__(self, file: DataFile, path: Path, index: NDArray[Any]) -> None:
        self.file = file
        self.num_rows = int(index["rows"].sum())
        self.num_bytes = int(index["num_bytes"].sum())
        self._path = path
        self._size = path.stat().st_size
        # Views, because NumPy makes a single number in several times what Python takes
        self._ends = np.cumsum(index["rows"]).data
        self._index = index.view(np.uint8).data
        self._warned = False

    @cached_property
    def _mapped(self) -> memoryview:
        """The bytes of the file, of the size that its index was made for."""
        try:
            mapped = row_index.map_file(self._path)
        except (OSError, pa.ArrowException) as error:
            raise text_column.damaged(self._path, error) from error
        if mapped.size != self._size:
            raise text_column.damaged(self._path, "it has changed since it was opened")
        return memoryview(mapped).cast("B")

    def read(self, row: int) -> memoryview:
        batch = bisect_right(self._ends, row)
        rows, validity, offsets, width, text, text_bytes, _ = _ENTRY.unpack_from(
            self._index, batch * _ENTRY.size
        )
        row_in_batch: int = row - self._ends[batch] + rows
        mapped = self._mapped
        if validity >= 0 and not mapped[validity + (row_in_batch >> 3)] >> (row_in_batch & 7) & 1:
            return _EMPTY
        start, stop = _OFFSETS[width].unpack_from(mapped, offsets + row_in_batch * width)
        if not 0 <= start <= stop <= text_bytes:
            return self._warn(row)
        return mapped[text + start : text + stop]

    def _warn(self, row: int) -> memoryview:
        """An empty document in place of one that lies nowhere: no reason to lose a run."""
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "%s is damaged: row %d lies outside of its buffer and is read as an empty "
                "document, as will be others like it; write the file again",
                self.file.location,
                row,
            )
        return _EMPTY


class Corpus:
    """The documents of one source, numbered over all of its files in order."""

    def __init__(
        self, files: Sequence[Path | DataFile], column: str, key: str = text_column.KEY
    ) -> None:
        """Find out where the rows lie; files that cannot be mapped are converted first.

        Args:
            files: Arrow IPC files, in the file or the stream format, or Parquet files.
            column: The column that holds the documents.
            key: Config key that names the column, for messages.

        Raises:
            ConfigError: If a file is missing or damaged, or has no such column.
        """
        self._column = column
        self._files = _open_files([_describe(file) for file in files], column, key)
        self._ends = list(accumulate(file.num_rows for file in self._files))
        self._num_rows = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        """Number of rows, empty documents included."""
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(file.num_bytes for file in self._files)

    def document(self, row: int) -> memoryview:
        """The bytes of the document in a row, as they lie in the file; a null is empty.

        They should be UTF-8, and nobody has checked. A row whose bytes lie outside of its file's
        buffer is empty too, and the first of a file is logged.

        Raises:
            ConfigError: If the file is gone, or is another one than was opened.
        """
        assert 0 <= row < self._num_rows
        number = bisect_right(self._ends, row)
        return self._files[number].read(row - (self._ends[number - 1] if number else 0))

    def text(self, row: int) -> str:
        """The document in a row as text, with U+FFFD in place of what is not UTF-8."""
        return str(self.document(row), "utf-8", "replace")

    def fingerprint(self) -> dict[str, Any]:
        """Files, rows and a sha256, which change when the documents or their order do.

        How the rows are cut into batches or compressed does not enter, only what they hold.
        """
        return {"files": len(self._files), "rows": len(self), "sha256": self._sha256}

    @cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256(f"column {self._column}\n".encode())
        for one in self._files:
            digest.update(f"file {one.file.name} {one.num_bytes} {one.num_rows}\n".encode())
        count = min(NUM_SAMPLED_ROWS, len(self))
        for row in np.linspace(0, len(self) - 1, count).astype(np.int64):
            digest.update(hashlib.sha256(self.document(int(row))).digest())
        return digest.hexdigest()


def _describe(file: Path | DataFile) -> DataFile:
    if isinstance(file, DataFile):
        return file
    try:
        return DataFile.at(file)
    except OSError as error:
        raise text_column.damaged(file, error) from error


def _open_files(files: Sequence[DataFile], column: str, key: str) -> list[_File]:
    places = {file: _find(file, column) for file in files}
    unknown = [file for file, place in places.items() if place is None]
    scanned = _scan([file for file in unknown if not file.is_remote], column, key)
    to_stage = [file for file in unknown if file not in scanned]
    staged = staging.stage(to_stage, column, key) if to_stage else {}
    places.update({**scanned, **staged})
    return [_File(file, *place) for file, place in places.items() if place is not None]


def _find(file: DataFile, column: str) -> Place | None:
    """Where the file's rows can be read, if that is known."""
    index = None if file.is_remote else row_index.find(file, column)
    return staging.find(file, column) if index is None else (Path(file.location), index)


def _scan(files: Sequence[DataFile], column: str, key: str) -> dict[DataFile, Place]:
    """Index those of the files that can be mapped."""
    scanned: dict[DataFile, Place] = {}
    problems: list[str] = []
    interactive = sys.stderr.isatty()
    for file in tqdm(files, "indexing rows", unit="file", disable=not interactive, leave=False):
        try:
            index = row_index.scan(Path(file.location), column, key)
        except row_index.CannotMapError:
            continue
        except ConfigError as error:
            problems += error.problems
        else:
            row_index.remember(index, file, column)
            scanned[file] = Path(file.location), index
        if len(problems) >= MAX_PROBLEMS:
            break
    if problems:
        raise ConfigError(*problems)
    return scanned
