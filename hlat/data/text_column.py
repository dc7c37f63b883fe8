"""The text column of one Arrow or Parquet file, batch by batch.

Row indexing and conversion share these checks and messages. Only the text column of a converted
file is read; other columns (embeddings, images) cost no time.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from hlat.config.config_errors import ConfigError

CONFIG_KEY = "data.text_column"
"""Config key of the column's name, unless a source overrides it."""
PARQUET_MAGIC = b"PAR1"
ROWS_PER_BATCH = 1024
"""Rows of a batch read from Parquet, whose row groups may exceed memory."""

_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def build_damaged_file_error(location: object, reason: object) -> ConfigError:
    """Return the error for a file that is not readable as Arrow or Parquet."""
    text = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
    return ConfigError(
        f"{location}: not a whole Arrow or Parquet file ({text}); write it again, or take it out "
        "of the paths of its source"
    )


def is_plain_text_type(type_: pa.DataType) -> bool:
    """Return True for string and large_string, which consist of offsets and bytes."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _is_text_type(type_: pa.DataType) -> bool:
    """Return True for text types, including those that must be converted."""
    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    return is_plain_text_type(value_type) or str(type_) == "string_view"


def find_text_column(
    location: object, schema: pa.Schema, column: str, config_key: str = CONFIG_KEY
) -> int:
    """Return the index of the text column in a file's schema.

    Raises:
        ConfigError: If the column is missing, ambiguous or no text.
    """
    text_columns = [field.name for field in schema if _is_text_type(field.type)]
    remedy = "write the documents as a column of type string or large_string"
    if text_columns:
        alone = ", or text_column of this source alone," if config_key == CONFIG_KEY else ""
        remedy = f"set it{alone} to one of: {', '.join(text_columns)}"
    listed = ", ".join(f"{field.name} ({field.type})" for field in schema) or "no columns"
    indices = schema.get_all_field_indices(column)
    if len(indices) != 1:
        count = f"{len(indices)} columns" if indices else "no column"
        raise ConfigError(
            f"{config_key}={column}: {location} has {count} of this name; it has {listed}; {remedy}"
        )
    index: int = indices[0]
    if column not in text_columns:
        raise ConfigError(
            f"{config_key}={column}: this column of {location} is {schema.field(index).type}, not "
            f"string or large_string; it has {listed}; {remedy}"
        )
    return index


def read_text_batches(
    location: object,
    file: pa.NativeFile,
    column: str,
    config_key: str = CONFIG_KEY,
    zero_copy: bool = False,
) -> Iterator[pa.Array]:
    """Yield the text column of an Arrow file or stream, or of Parquet, after a check of its bounds.

    With `zero_copy`, read all columns of a mapped Arrow file and yield views; Arrow copies if it
    reads a selection of columns.

    Raises:
        ConfigError: If the file is damaged or lacks the column.
    """
    try:
        for array in read_column(location, file, column, config_key, zero_copy=zero_copy):
            array.validate(full=not is_plain_text_type(array.type))
            yield array
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise build_damaged_file_error(location, error) from error


def read_column(
    location: object,
    file: pa.NativeFile,
    column: str,
    config_key: str,
    *,
    zero_copy: bool = False,
    rows_per_batch: int = ROWS_PER_BATCH,
) -> Iterator[pa.Array]:
    """Yield the text column of a file without checks of its values.

    Raises:
        ConfigError: If the file lacks the column.
        pyarrow.ArrowException, OSError, OverflowError: If the file is damaged or truncated.
    """
    magic = file.read_at(len(_FILE_MAGIC), 0)
    if magic.startswith(PARQUET_MAGIC):
        parquet = pa.parquet.ParquetFile(file)
        find_text_column(location, parquet.schema_arrow, column, config_key)
        for batch in parquet.iter_batches(rows_per_batch, columns=[column]):
            yield batch.column(0)
        return
    is_file_format = magic == _FILE_MAGIC
    open_: Any = pa.ipc.open_file if is_file_format else pa.ipc.open_stream
    file.seek(0)
    index = find_text_column(location, open_(file).schema, column, config_key)
    file.seek(0)
    included = None if zero_copy else [index]
    reader = open_(file, options=pa.ipc.IpcReadOptions(included_fields=included))
    count = reader.num_record_batches if is_file_format else 0
    batches = map(reader.get_batch, range(count)) if is_file_format else reader
    for batch in batches:
        yield batch.column(index if zero_copy else 0)
    end = file.read_at(len(_STREAM_END), max(0, file.size() - len(_STREAM_END)))
    if not is_file_format and end != _STREAM_END:
        raise OSError("it does not end as Arrow files and streams do")
