"""The text column of one Arrow or Parquet file, batch by batch.

Whoever indexes a file and whoever converts it must agree on which files hold text, and say the same
words about those that do not. Of a file that is converted only the text column is read: embeddings
or images beside it cost nothing.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from hlat.config.errors import ConfigError

KEY = "data.text_column"
"""Config key of the column's name, unless a source has its own."""
PARQUET_MAGIC = b"PAR1"
ROWS_PER_BATCH = 1024
"""Rows of a batch read from Parquet, whose row groups are too large to hold."""

_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def damaged(location: object, reason: object) -> ConfigError:
    """The error for a file that is not what its name says."""
    text = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
    return ConfigError(
        f"{location}: not a whole Arrow or Parquet file ({text}); write it again, or take it out "
        "of the paths of its source"
    )


def is_plain(type_: pa.DataType) -> bool:
    """Whether a column of this type is offsets and text, as a mapped row needs it."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _is_text(type_: pa.DataType) -> bool:
    """Whether a column of this type is text in some form, perhaps one that must be converted."""
    if pa.types.is_dictionary(type_):
        return is_plain(type_.value_type)
    return is_plain(type_) or str(type_) == "string_view"


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema) or "no columns"


def find_field(location: object, schema: pa.Schema, column: str, key: str = KEY) -> int:
    """Index of the text column in a file's schema.

    Args:
        location: The file, for messages.
        schema: Its columns.
        column: The column's name.
        key: Config key that names the column, for messages.

    Raises:
        ConfigError: If there is no such column, there are several, or it holds no text.
    """
    texts = [field.name for field in schema if _is_text(field.type)]
    remedy = "write the documents as a column of type string or large_string"
    if texts:
        alone = ", or text_column of this source alone," if key == KEY else ""
        remedy = f"set it{alone} to one of: {', '.join(texts)}"
    indices = schema.get_all_field_indices(column)
    if len(indices) != 1:
        count = f"{len(indices)} columns" if indices else "no column"
        raise ConfigError(
            f"{key}={column}: {location} has {count} of this name; it has {_describe(schema)}; "
            f"{remedy}"
        )
    index: int = indices[0]
    if column not in texts:
        raise ConfigError(
            f"{key}={column}: this column of {location} is {schema.field(index).type}, not string "
            f"or large_string; it has {_describe(schema)}; {remedy}"
        )
    return index


def read_batches(
    location: object, file: pa.NativeFile, column: str, key: str = KEY, in_place: bool = False
) -> Iterator[pa.Array]:
    """Yield the text column of a file's batches, validated as far as their bounds go.

    Args:
        location: The file, for messages.
        file: The open file: Arrow IPC in the file or the stream format, or Parquet.
        column: The column's name.
        key: Config key that names the column, for messages.
        in_place: Yield views of an Arrow file that is mapped: where Arrow reads one column alone,
            it copies it.

    Raises:
        ConfigError: If the file is damaged, or has no such column.
    """
    try:
        for array in _read(location, file, column, key, in_place):
            array.validate(full=not is_plain(array.type))
            yield array
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise damaged(location, error) from error


def _read(
    location: object, file: pa.NativeFile, column: str, key: str, in_place: bool
) -> Iterator[pa.Array]:
    size = file.size()
    magic = file.read_at(len(_FILE_MAGIC), 0)
    if magic.startswith(PARQUET_MAGIC):
        yield from _read_parquet(location, file, column, key)
        return
    is_file_format = magic == _FILE_MAGIC
    end = file.read_at(len(_STREAM_END), max(0, size - len(_STREAM_END)))
    if not is_file_format and end != _STREAM_END:
        raise damaged(location, "it does not end as Arrow files and streams do")
    open_: Any = pa.ipc.open_file if is_file_format else pa.ipc.open_stream
    file.seek(0)
    index = find_field(location, open_(file).schema, column, key)
    file.seek(0)
    included = None if in_place else [index]
    reader = open_(file, options=pa.ipc.IpcReadOptions(included_fields=included))
    count = reader.num_record_batches if is_file_format else 0
    batches = map(reader.get_batch, range(count)) if is_file_format else reader
    for batch in batches:
        yield batch.column(index if in_place else 0)


def _read_parquet(
    location: object, file: pa.NativeFile, column: str, key: str
) -> Iterator[pa.Array]:
    reader = pa.parquet.ParquetFile(file)
    find_field(location, reader.schema_arrow, column, key)
    for batch in reader.iter_batches(ROWS_PER_BATCH, columns=[column]):
        yield batch.column(0)
