"""Index of the rows of an Arrow file, one entry per record batch, stored next to the file.

Arrow must read the metadata of every record batch to find its text, in minutes per process
for billions of rows. The index stores the byte positions once; a row is then read from the mapped
file by arithmetic.
"""

import contextlib
import io
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError
from hlat.data import text_column
from hlat.data.data_cache import get_cache_dir, replace_file
from hlat.storage.bounded_files import read_bounded
from hlat.storage.data_file import DataFile

FORMAT_VERSION = 1
"""Incremented when BATCH_DTYPE changes its meaning, which invalidates older indices."""
BATCH_DTYPE = np.dtype(
    [
        ("rows", "<i8"),
        ("validity", "<i8"),  # byte position of the bitmap of non-null rows; -1 without nulls
        ("offsets", "<i8"),  # byte position of the first row's offset
        ("width", "<i8"),  # bytes of an offset: 4 or 8
        ("text", "<i8"),  # byte position of the text that offsets count from
        ("text_bytes", "<i8"),
        ("num_bytes", "<i8"),  # bytes of all documents: the last offset minus the first
    ]
)
"""A record batch with at least one row; positions count from the start of the file."""
INDEX_SUFFIX = ".rows.npy"

_TAIL_BYTES = 4096
_MAX_INDEX_BYTES = 1 << 28
"""Limit of the file of an index, reached by nearly five million record batches."""
_CHECKSUM_BYTES = 4
_ALIGNMENT = 64


class CannotMapError(ConfigError):
    """Error for a valid file with text that is not stored as plain bytes."""


def get_sidecar_path(path: Path) -> Path:
    """Return the path of the index next to an Arrow file."""
    return path.with_name(path.name + INDEX_SUFFIX)


def get_cached_index_path(file: DataFile, column: str) -> Path:
    """Return the path in the cache directory of the index of a file without a sidecar."""
    key = file.compute_cache_key(column, FORMAT_VERSION)
    return get_cache_dir() / "index" / f"{key}{INDEX_SUFFIX}"


def build_row_index(
    path: Path, column: str, config_key: str = text_column.CONFIG_KEY
) -> NDArray[Any]:
    """Compute the index of a file.

    Returns:
        Entries of type BATCH_DTYPE, one for each record batch with rows.

    Raises:
        CannotMapError: If the file is Parquet or compressed, or its column has no offsets.
        ConfigError: If the file is missing or damaged, or lacks the column.
    """
    try:
        mapped = map_file(path)
    except (OSError, pa.ArrowException) as error:
        raise text_column.build_damaged_file_error(path, error) from error
    if mapped[: len(text_column.PARQUET_MAGIC)].to_pybytes() == text_column.PARQUET_MAGIC:
        raise _build_cannot_map_error(path, "it is Parquet")
    arrays = text_column.read_text_batches(
        path, pa.BufferReader(mapped), column, config_key, zero_copy=True
    )
    entries = [_build_entry(path, mapped, array) for array in arrays if len(array)]
    return np.array(entries, BATCH_DTYPE)


def map_file(path: Path) -> pa.Buffer:
    """Map a file and close it, as a corpus may exceed the limit of open files."""
    with pa.memory_map(os.fsencode(path)) as file:
        return file.read_buffer()


def _build_cannot_map_error(path: Path, reason: str) -> CannotMapError:
    return CannotMapError(
        f"{path}: {reason} and cannot be mapped; write it as Arrow without compression, with the "
        "documents in a column of type string or large_string"
    )


def _build_entry(path: Path, mapped: pa.Buffer, array: pa.Array) -> tuple[int, ...]:
    """Return the fields of BATCH_DTYPE for a record batch."""
    if not text_column.is_plain_text_type(array.type):
        raise _build_cannot_map_error(path, f"its text column is {array.type}")
    assert array.offset == 0  # the IPC format has no array offsets
    validity, offsets, text = array.buffers()
    if array.null_count == 0:
        validity = None
    width = 8 if pa.types.is_large_string(array.type) else 4
    ends = np.frombuffer(offsets, f"<i{width}", len(array) + 1)[[0, -1]].tolist()
    return (
        len(array),
        -1 if validity is None else _compute_position(path, mapped, validity),
        _compute_position(path, mapped, offsets),
        width,
        _compute_position(path, mapped, text) if text else 0,
        text.size if text else 0,
        ends[1] - ends[0],
    )


def _compute_position(path: Path, mapped: pa.Buffer, buffer: pa.Buffer) -> int:
    position: int = buffer.address - mapped.address
    if not 0 <= position <= mapped.size - buffer.size:
        raise _build_cannot_map_error(path, "its buffers are compressed")
    return position


def find_row_index(file: DataFile, column: str) -> tuple[NDArray[Any], Path | None] | None:
    """Load the index of a file from the cache directory or its sidecar, or return None.

    Returns:
        The index, and the path of the sidecar if it was loaded from there: others may have written
        it, so it must be compared with the file before its rows are used.
    """
    path = Path(file.location)
    if (index := load_row_index(get_cached_index_path(file, column), path, column)) is not None:
        return index, None
    sidecar = get_sidecar_path(path)
    index = load_row_index(sidecar, path, column)
    # One without rows would never be compared
    if index is not None and len(index) and _is_within(index, file.num_bytes):
        return index, sidecar
    return None


def _is_within(index: NDArray[Any], num_bytes: int) -> bool:
    """Return True if all buffers of an index are inside of a file of `num_bytes` bytes."""
    if any(index[name].max(initial=0) > num_bytes for name in BATCH_DTYPE.names or ()):
        return False  # the sums below cannot overflow
    is_within: bool = np.all(
        (index["rows"] > 0)
        & (index["validity"] >= -1)
        & (index["validity"] + -(-index["rows"] // 8) <= num_bytes)
        & (index["offsets"] >= 0)
        & np.isin(index["width"], (4, 8))
        & (index["offsets"] + (index["rows"] + 1) * index["width"] <= num_bytes)
        & (index["text"] >= 0)
        & (index["text_bytes"] >= index["num_bytes"])
        & (index["num_bytes"] >= 0)
        & (index["text"] + index["text_bytes"] <= num_bytes)
    ).item()
    return is_within


def validate_sidecar(
    sidecar: Path, index: NDArray[Any], file: DataFile, column: str, config_key: str
) -> None:
    """Compare the index of a sidecar with the file, and copy a correct one to the cache directory.

    Raises:
        ConfigError: If the index does not describe the file.
    """
    path = Path(file.location)
    if not np.array_equal(index, build_row_index(path, column, config_key)):
        raise ConfigError(
            f"{sidecar} does not describe the rows of {path}; delete it, hlat then creates it in "
            "its cache directory"
        )
    cache_row_index(index, file, column)


def cache_row_index(index: NDArray[Any], file: DataFile, column: str) -> None:
    """Save an index in the cache directory if it is writable."""
    target = get_cached_index_path(file, column)
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        save_row_index(index, Path(file.location), column, target)


def save_row_index(
    index: NDArray[Any], path: Path, column: str, target: Path | None = None
) -> None:
    """Write the index of an Arrow file atomically, by default to its sidecar.

    Raises:
        OSError: If it cannot be written.
    """
    identity = _compute_identity(path, column)
    record = np.zeros((), [("about", f"S{len(identity)}"), ("batches", BATCH_DTYPE, index.shape)])
    record["about"] = identity
    record["batches"] = index
    content = io.BytesIO()
    np.save(content, record)
    content.write(zlib.crc32(content.getvalue()).to_bytes(_CHECKSUM_BYTES, "little"))
    replace_file(target or get_sidecar_path(path), content.getvalue())


def load_row_index(index_file: Path, path: Path, column: str) -> NDArray[Any] | None:
    """Load an index, or return None if it is missing, damaged or of another file or column."""
    try:
        content = read_bounded(index_file, _MAX_INDEX_BYTES)
        identity = _compute_identity(path, column)
    except OSError:
        return None
    body = memoryview(content)[:-_CHECKSUM_BYTES]
    if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") != content[-_CHECKSUM_BYTES:]:
        return None
    # np.load would parse the header for as long as reading a thousand rows; the checksum covers it
    start = 10 + int.from_bytes(body[8:10], "little")
    middle = start + len(identity)
    if body[start:middle] != identity or (len(body) - middle) % BATCH_DTYPE.itemsize:
        return None
    return np.frombuffer(body, BATCH_DTYPE, offset=middle)


def _compute_identity(path: Path, column: str) -> bytes:
    """Return the format, column, size and tail checksum of a file as padded JSON.

    The tail of a file lists its record batches or is text, so it distinguishes files of equal size.
    """
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = zlib.crc32(file.read())
    facts = {"format": FORMAT_VERSION, "column": column, "file_bytes": size, "tail_crc32": tail}
    content = json.dumps(facts).encode()
    return content.ljust(-(-len(content) // _ALIGNMENT) * _ALIGNMENT)
