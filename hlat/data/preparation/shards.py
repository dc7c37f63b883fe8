"""Arrow files that a run maps into memory: documents in, parts of about a gigabyte out.

A run opens every part before its first step, so what opening costs (a few numbers a record batch)
must not grow with the documents, and a part must be small enough to be copied, checked and mounted
by itself. Offsets have 64 bits: neither a document nor a batch can be too long for them.
"""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hlat.data import row_index

COLUMN = "text"
SCHEMA = pa.schema([(COLUMN, pa.large_string())])
BATCH_ROWS = 1 << 16
BATCH_BYTES = 64 << 20
"""A record batch ends at whichever comes first; a longer document is a batch of its own."""
PART_BYTES = 1 << 30
"""Bytes of text after which a part ends with its batch."""


@dataclass(frozen=True)
class Part:
    """A file as it was written, which is how it must be found again."""

    name: str
    bytes: int
    sha256: str
    rows: int
    text_bytes: int
    longest_bytes: int
    """Its longest document."""


class _Sink:
    """A new file that hashes what is written to it and is flushed to the disk when it is closed."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._file = path.open("xb")
        self.size = 0

    def write(self, block: Any) -> int:
        view = memoryview(block)
        self._digest.update(view)
        try:
            self._file.write(view)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Everything is flushed at the end."""

    def finish(self) -> str:
        """Flush the file to the disk; the sha256 of what it holds."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        with suppress(OSError):  # a full disk refuses what is still buffered once more
            self._file.close()


class _OpenPart:
    """The part that is being written."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._sink = _Sink(path)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._sink, mode="w"), SCHEMA)
        self._rows = self.text_bytes = self._longest = 0

    def add(self, texts: list[bytes]) -> None:
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        buffers = pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))
        array = pa.LargeStringArray.from_buffers(len(texts), *buffers)
        self._writer.write_batch(pa.record_batch([array], schema=SCHEMA))
        self._rows += len(texts)
        self.text_bytes += int(offsets[-1])
        self._longest = max(self._longest, int(lengths.max()))

    def finish(self) -> Part:
        self._writer.close()
        sha256 = self._sink.finish()
        return Part(self._name, self._sink.size, sha256, self._rows, self.text_bytes, self._longest)

    def abandon(self) -> None:
        self._sink.abandon()


class Writer:
    """Writes documents to the parts of one folder.

    The same documents give the same files, byte for byte.
    """

    def __init__(self, folder: Path) -> None:
        """Write to a folder that is there and has no parts yet."""
        self._folder = folder
        self._texts: list[bytes] = []
        self._num_bytes = 0
        self._part: _OpenPart | None = None
        self._parts: list[Part] = []

    def add(self, text: bytes) -> None:
        """Add a document.

        Args:
            text: UTF-8.

        Raises:
            OSError: If it cannot be written, for example because the disk is full.
        """
        if self._texts and self._num_bytes + len(text) > BATCH_BYTES:
            self._write_batch()
        self._texts.append(text)
        self._num_bytes += len(text)
        if len(self._texts) >= BATCH_ROWS or self._num_bytes >= BATCH_BYTES:
            self._write_batch()

    def finish(self) -> list[Part]:
        """Flush everything to the disk; the parts in order."""
        if self._texts:
            self._write_batch()
        self._end_part()
        return self._parts

    def abandon(self) -> None:
        """Close what is open; the files are not to be used."""
        if self._part is not None:
            self._part.abandon()

    def _write_batch(self) -> None:
        if self._part is None:
            self._part = _OpenPart(self._folder / part_name(len(self._parts)))
        self._part.add(self._texts)
        self._texts, self._num_bytes = [], 0
        if self._part.text_bytes >= PART_BYTES:
            self._end_part()

    def _end_part(self) -> None:
        if self._part is not None:
            self._parts.append(self._part.finish())
            self._part = None


def part_name(number: int) -> str:
    """Name of a part by its number in the folder."""
    return f"part-{number:05d}.arrow"


def write_row_index(part: Path) -> Path:
    """Write the row index of a finished part beside it, and return its path.

    Raises:
        OSError: If it cannot be written.
    """
    row_index.save(row_index.scan(part, COLUMN), part, COLUMN)
    return row_index.sidecar(part)
