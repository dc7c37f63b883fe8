"""The text column of one Arrow or Parquet file, batch by batch.

Row indexing and conversion share these checks and messages. Only the text column of a converted
file is read; other columns (embeddings, images) cost no time.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet

from hlat.config.config_errors import ConfigError

CONFIG_KEY = "data.text_column"
"""Config key of the column's name, unless a source overrides it."""
PARQUET_MAGIC = b"PAR1"
ROWS_PER_BATCH = 1024
"""Rows of a batch read from Parquet, whose row groups may exceed memory."""

ARROW_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def build_damaged_file_error(location: object, reason: object) -> ConfigError:
    """Return the error for a file that is not readable as Arrow or Parquet."""
    text = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
    return ConfigError(
        f"{location}: not a whole Arrow or Parquet file ({text}); write it again, take it out of "
        "the paths of its source, or convert what can be read with `hlat prepare`"
    )


def is_plain_text_type(type_: pa.DataType) -> bool:
    """Return True for string and large_string, which consist of offsets and bytes."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _is_text_type(type_: pa.DataType) -> bool:
    """Return True for text types and lists of them, including those that must be converted."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return is_plain_text_type(type_.value_type)
    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    return is_plain_text_type(value_type) or str(type_) == "string_view"


def _list_columns(
    fields: Iterable[pa.Field], parents: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yield path and type of each column, and of each field of a struct."""
    for field in fields:
        path = (*parents, field.name)
        yield path, field.type
        if pa.types.is_struct(field.type):
            yield from _list_columns(field.type, path)


def find_text_column(
    location: object, schema: pa.Schema, column: str, config_key: str = CONFIG_KEY
) -> tuple[str, ...]:
    """Return the path of a text column in a file's schema: `a.b` is the field `b` of a struct `a`.

    Raises:
        ConfigError: If the column is missing, ambiguous or no text.
    """
    columns = [(".".join(path), path, type_) for path, type_ in _list_columns(schema)]
    text_columns = [name for name, _, type_ in columns if _is_text_type(type_)]
    remedy = "write the documents as a column of type string or large_string"
    if text_columns:
        alone = ", or text_column of this source alone," if config_key == CONFIG_KEY else ""
        remedy = f"set it{alone} to one of: {', '.join(text_columns)}"
    listed = ", ".join(f"{field.name} ({field.type})" for field in schema) or "no columns"
    found = [(path, type_) for name, path, type_ in columns if name == column]
    if len(found) != 1:
        count = f"{len(found)} columns" if found else "no column"
        raise ConfigError(
            f"{config_key}={column}: {location} has {count} of this name; it has {listed}; {remedy}"
        )
    ((path, type_),) = found
    if not _is_text_type(type_):
        raise ConfigError(
            f"{config_key}={column}: this column of {location} is {type_}, not string or "
            f"large_string; it has {listed}; {remedy}"
        )
    return path


def _select_field(array: pa.Array, names: Sequence[str]) -> pa.Array:
    """Return a field of a struct array as text; the strings of a list are lines of one document."""
    array.validate()  # a negative length of a damaged file would end the process
    if names:
        from pyarrow import compute  # Deferred: the import creates hundreds of functions

        for name in names:
            array = compute.struct_field(array, name)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        array.validate(full=True)
        rows = array.to_pylist()
        lines = (row and "\n".join(line for line in row if line is not None) for row in rows)
        return pa.array(lines, pa.large_string())
    return array


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
        for array in read_column(location, file, column, config_key, zero_copy):
            array.validate(full=not is_plain_text_type(array.type))
            yield array
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise build_damaged_file_error(location, error) from error


class ColumnPart(NamedTuple):
    """Part of a file that is readable without the others: a row group or record batch."""

    num_rows: int | None
    """None if only the part itself states it."""
    num_bytes: int
    """Approximate bytes of the text column."""
    arrays: Iterator[pa.Array]


def read_column(
    location: object, file: pa.NativeFile, column: str, config_key: str, zero_copy: bool = False
) -> Iterator[pa.Array]:
    """Yield the text column of a file without checks of its values.

    Raises:
        ConfigError: If the file lacks the column.
        pyarrow.ArrowException, OSError, OverflowError: If the file is damaged or truncated.
    """
    for part in iter_column_parts(location, file, column, config_key, zero_copy=zero_copy):
        yield from part.arrays


def iter_column_parts(
    location: object,
    file: pa.NativeFile,
    column: str,
    config_key: str,
    *,
    zero_copy: bool = False,
    rows_per_batch: int = ROWS_PER_BATCH,
) -> Iterator[ColumnPart]:
    """Yield the parts of a file; their arrays are read when they are iterated.

    Raises:
        ConfigError: If the file lacks the column.
        pyarrow.ArrowException, OSError, OverflowError: If the file has no readable schema.
    """
    magic = file.read_at(len(ARROW_MAGIC), 0)
    if magic.startswith(PARQUET_MAGIC):
        yield from _iter_row_groups(location, file, column, config_key, rows_per_batch)
        return
    is_file_format = magic == ARROW_MAGIC
    open_: Any = pa.ipc.open_file if is_file_format else pa.ipc.open_stream
    file.seek(0)
    schema = open_(file).schema
    first, *names = find_text_column(location, schema, column, config_key)
    index = schema.get_field_index(first)
    file.seek(0)
    included = None if zero_copy else [index]
    reader = open_(file, options=pa.ipc.IpcReadOptions(included_fields=included))

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Array]:
        for batch in batches:
            yield _select_field(batch.column(index if zero_copy else 0), names)

    if is_file_format:
        count = reader.num_record_batches
        for number in range(count):
            yield ColumnPart(None, file.size() // count, read(map(reader.get_batch, [number])))
    else:
        yield ColumnPart(None, file.size(), itertools.chain(read(reader), _validate_end(file)))


def _iter_row_groups(
    location: object, file: pa.NativeFile, column: str, config_key: str, rows_per_batch: int
) -> Iterator[ColumnPart]:
    parquet = pa.parquet.ParquetFile(file, page_checksum_verification=True)
    _, *names = find_text_column(location, parquet.schema_arrow, column, config_key)

    def read(number: int) -> Iterator[pa.Array]:
        for batch in parquet.iter_batches(rows_per_batch, row_groups=[number], columns=[column]):
            yield _select_field(batch.column(0), names)

    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        chunks = map(group.column, range(group.num_columns))
        num_bytes = sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if f"{chunk.path_in_schema}.".startswith(f"{column}.")
        )
        yield ColumnPart(group.num_rows, num_bytes, read(number))


def _validate_end(file: pa.NativeFile) -> Iterator[pa.Array]:
    """Raise OSError if a stream is truncated; yield nothing."""
    end = file.read_at(len(_STREAM_END), max(0, file.size() - len(_STREAM_END)))
    if end != _STREAM_END:
        raise OSError("it does not end as Arrow files and streams do")
    yield from ()
