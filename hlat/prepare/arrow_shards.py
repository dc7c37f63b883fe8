"""Writer of Arrow shards of about one gigabyte that runs memory-map.

A run opens every shard before its first step, so the cost of opening (some numbers per record
batch) must not grow with the number of documents, and a shard must be small enough to be copied,
verified and mounted individually. Offsets have 64 bits, so that documents and batches have no
size limit.
"""

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

TEXT_COLUMN = "text"
SCHEMA = pa.schema([(TEXT_COLUMN, pa.large_string())])
BATCH_ROWS = 1 << 16
BATCH_BYTES = 64 << 20
"""Size that ends a record batch, as `BATCH_ROWS` does; a longer document is a separate batch."""
SHARD_BYTES = 1 << 30
"""Bytes of text after which a shard ends with its batch."""


@dataclass(frozen=True)
class ShardRecord:
    """Record of a shard in the manifest; `longest_bytes` is the size of its longest document."""

    name: str
    bytes: int
    sha256: str
    rows: int
    text_bytes: int
    longest_bytes: int


class _HashingFile(io.BufferedWriter):
    """New file that is hashed while it is written and flushed to disk when it is finished."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))
        self._path, self._digest = path, hashlib.sha256()

    def write(self, block: Any) -> int:
        self._digest.update(block)
        num_bytes: int = self._call(super().write, block)
        return num_bytes

    def flush(self) -> None:
        self._call(super().flush)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def finish(self) -> tuple[int, str]:
        """Flush the file to disk and return its size and SHA-256."""
        self.flush()
        os.fsync(self.fileno())
        size = self.tell()
        self.close()
        return size, self._digest.hexdigest()

    def close_unfinished(self) -> None:
        with suppress(OSError):  # closing repeats the failed write if the disk is full
            self.close()


class _ShardFile:
    """Shard that is being written."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self.file = _HashingFile(path)
        self._writer = pa.ipc.new_file(pa.PythonFile(self.file, mode="w"), SCHEMA)
        self._num_rows = self.text_bytes = self._longest_bytes = 0

    def write_batch(self, documents: list[bytes]) -> None:
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        offsets = np.zeros(len(documents) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        buffers = pa.py_buffer(offsets), pa.py_buffer(b"".join(documents))
        array = pa.LargeStringArray.from_buffers(len(documents), *buffers)
        self._writer.write_batch(pa.record_batch([array], schema=SCHEMA))
        self._num_rows += len(documents)
        self.text_bytes += int(offsets[-1])
        self._longest_bytes = max(self._longest_bytes, int(lengths.max()))

    def finish(self) -> ShardRecord:
        self._writer.close()
        counts = self._num_rows, self.text_bytes, self._longest_bytes
        return ShardRecord(self._name, *self.file.finish(), *counts)


class ArrowShardWriter:
    """Writer of documents to the shards of a directory.

    The same documents result in the same files, byte for byte.

    Args:
        directory: Existing directory without shards.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._documents: list[bytes] = []
        self._num_bytes = 0
        self._shard: _ShardFile | None = None
        self._records: list[ShardRecord] = []

    def add(self, document: bytes) -> None:
        """Add a document in UTF-8.

        Raises:
            OSError: If writing fails, for example because the disk is full.
        """
        if self._documents and self._num_bytes + len(document) > BATCH_BYTES:
            self._write_batch()
        self._documents.append(document)
        self._num_bytes += len(document)
        if len(self._documents) >= BATCH_ROWS or self._num_bytes >= BATCH_BYTES:
            self._write_batch()

    def finish(self) -> list[ShardRecord]:
        """Flush all shards to disk and return their records in order."""
        if self._documents:
            self._write_batch()
        self._finish_shard()
        return self._records

    def close_unfinished(self) -> None:
        """Close the open file after an error; the shards are incomplete."""
        if self._shard is not None:
            self._shard.file.close_unfinished()

    def _write_batch(self) -> None:
        if self._shard is None:
            self._shard = _ShardFile(self._directory / format_shard_name(len(self._records)))
        self._shard.write_batch(self._documents)
        self._documents, self._num_bytes = [], 0
        if self._shard.text_bytes >= SHARD_BYTES:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._records.append(self._shard.finish())
            self._shard = None


def read_shard(path: Path) -> Iterator[list[bytes]]:
    """Yield the documents of a shard in UTF-8, one record batch at a time."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number).column(0).cast(pa.large_binary()).to_pylist()


def format_shard_name(number: int) -> str:
    """Return the file name of a shard by its number in the directory."""
    return f"part-{number:05d}.arrow"
