"""Where the rows of an Arrow file lie: one entry per record batch, kept beside the file.

To find its text Arrow must read the metadata of every record batch, which for billions of rows
takes minutes in each process of each run. What it finds is a handful of byte positions that never
change, so they are worked out once, stored with what they belong to, and a row is then read from
the mapped file by arithmetic.
"""

import io
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hlat.config.errors import ConfigError
from hlat.data import text_column
from hlat.data.data_file import DataFile
from hlat.data.embedded import cache_folder

FORMAT = 1
"""Raised when BATCH changes its meaning, so that no index of another format is read."""
BATCH = np.dtype(
    [
        ("rows", "<i8"),
        ("validity", "<i8"),  # byte position of the bitmap of rows that are not null; -1: none is
        ("offsets", "<i8"),  # byte position of the first row's offset
        ("width", "<i8"),  # bytes of an offset: 4 or 8
        ("text", "<i8"),  # byte position of the text that offsets count from
        ("text_bytes", "<i8"),
        ("num_bytes", "<i8"),  # bytes of all documents: the last offset minus the first
    ]
)
"""A record batch with at least one row; positions count from the start of the file."""
SUFFIX = ".rows.npy"

_TAIL_BYTES = 4096
_CHECKSUM_BYTES = 4
_ALIGNMENT = 64


class CannotMapError(ConfigError):
    """The file is sound, but its text does not lie in it as plain bytes."""


def sidecar(path: Path) -> Path:
    """The file beside an Arrow file that holds its index."""
    return path.with_name(path.name + SUFFIX)


def remembered(file: DataFile, column: str) -> Path:
    """The file in the cache folder that holds the index of a file without a sidecar."""
    return cache_folder() / "index" / (file.digest(column, FORMAT) + SUFFIX)


def scan(path: Path, column: str, key: str = text_column.KEY) -> NDArray[Any]:
    """Work out the index of a file.

    Args:
        path: An Arrow IPC file, in the file or the stream format.
        column: The column that holds the documents.
        key: Config key that names the column, for messages.

    Returns:
        Entries of type BATCH, one for each record batch with rows.

    Raises:
        CannotMapError: If the file is Parquet, compressed, or its column is of a type without
            offsets.
        ConfigError: If the file is missing or damaged, or has no such column.
    """
    try:
        mapped = map_file(path)
    except (OSError, pa.ArrowException) as error:
        raise text_column.damaged(path, error) from error
    if mapped[: len(text_column.PARQUET_MAGIC)].to_pybytes() == text_column.PARQUET_MAGIC:
        raise _cannot_map(path, "it is Parquet")
    arrays = text_column.read_batches(path, pa.BufferReader(mapped), column, key, in_place=True)
    entries = [_entry(path, mapped, array) for array in arrays if len(array)]
    return np.array(entries, BATCH)


def map_file(path: Path) -> pa.Buffer:
    """Map a file without holding it open: a corpus has more files than a process may open."""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def _cannot_map(path: Path, reason: str) -> CannotMapError:
    return CannotMapError(
        f"{path}: {reason} and cannot be mapped; write it as Arrow without compression, with the "
        "documents in a column of type string or large_string"
    )


def _entry(path: Path, mapped: pa.Buffer, array: pa.Array) -> tuple[int, ...]:
    """A record batch as BATCH lists it."""
    if not text_column.is_plain(array.type):
        raise _cannot_map(path, f"its text column is {array.type}")
    assert array.offset == 0  # the format has no offset of arrays
    validity, offsets, text = array.buffers()
    if array.null_count == 0:
        validity = None
    width = 8 if pa.types.is_large_string(array.type) else 4
    ends = np.frombuffer(offsets, f"<i{width}", len(array) + 1)[[0, -1]].tolist()
    return (
        len(array),
        -1 if validity is None else _position(path, mapped, validity),
        _position(path, mapped, offsets),
        width,
        _position(path, mapped, text) if text else 0,
        text.size if text else 0,
        ends[1] - ends[0],
    )


def _position(path: Path, mapped: pa.Buffer, buffer: pa.Buffer) -> int:
    position: int = buffer.address - mapped.address
    if not 0 <= position <= mapped.size - buffer.size:
        raise _cannot_map(path, "its buffers are compressed")
    return position


def find(file: DataFile, column: str) -> NDArray[Any] | None:
    """The index of a file, as its sidecar or the cache folder holds it, if either does."""
    path = Path(file.location)
    index = load(sidecar(path), path, column)
    return load(remembered(file, column), path, column) if index is None else index


def remember(index: NDArray[Any], file: DataFile, column: str) -> None:
    """Keep an index in the cache folder; a cache that cannot be written only costs time."""
    target = remembered(file, column)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save(index, Path(file.location), column, target)
    except OSError:
        return


def save(index: NDArray[Any], path: Path, column: str, target: Path | None = None) -> None:
    """Write an index, whole or not at all.

    Args:
        index: What `scan` returned.
        path: The Arrow file that it belongs to, complete.
        column: The column that it belongs to.
        target: Where to write it; the sidecar if none is given.

    Raises:
        OSError: If it cannot be written.
    """
    target = target or sidecar(path)
    about = _about(path, column)
    record = np.zeros((), [("about", f"S{len(about)}"), ("batches", BATCH, index.shape)])
    record["about"] = about
    record["batches"] = index
    content = io.BytesIO()
    np.save(content, record)
    content.write(zlib.crc32(content.getvalue()).to_bytes(_CHECKSUM_BYTES, "little"))
    with tempfile.NamedTemporaryFile(prefix=".rows-", dir=target.parent, delete=False) as file:
        try:
            file.write(content.getvalue())
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def load(source: Path, path: Path, column: str) -> NDArray[Any] | None:
    """Read an index.

    Args:
        source: The file that `save` wrote.
        path: The Arrow file that the index should belong to.
        column: The column that it should belong to.

    Returns:
        The entries; none if there is no such index, it is damaged, or it belongs to something else.
    """
    try:
        content = source.read_bytes()
        about = _about(path, column)
    except OSError:
        return None
    body = memoryview(content)[:-_CHECKSUM_BYTES]
    if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") != content[-_CHECKSUM_BYTES:]:
        return None
    # np.load would take the time of a thousand rows to parse a header that the checksum vouches for
    start = 10 + int.from_bytes(body[8:10], "little")
    middle = start + len(about)
    if body[start:middle] != about or (len(body) - middle) % BATCH.itemsize:
        return None
    return np.frombuffer(body, BATCH, offset=middle)


def _about(path: Path, column: str) -> bytes:
    """What an index belongs to, as its file says it.

    The tail of a file tells it from another one of the same size: it lists the record batches, or
    is text.
    """
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = zlib.crc32(file.read())
    facts = {"format": FORMAT, "column": column, "file_bytes": size, "tail_crc32": tail}
    text = json.dumps(facts).encode()
    return text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
