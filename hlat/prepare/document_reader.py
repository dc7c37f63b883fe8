"""Reader of the documents in JSON lines, Parquet and Arrow files, as UTF-8 bytes.

Files are read in bounded memory. A damaged document is returned as `DamagedDocument` with its
location and the reason, so that the caller decides how to handle it. A truncated file yields the
documents before the end.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hlat.config.config_errors import ConfigError
from hlat.prepare.input_files import InputReader, detect_format

BLOCK_BYTES = 1 << 20
ROWS_PER_READ = 256
"""Rows of a Parquet file in memory at once."""

_decode = json.JSONDecoder().decode
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True)
class DamagedDocument:
    """Document that cannot be read."""

    location: str
    """`line 12` (from 1), `row 11` (from 0), or the position where the file becomes unreadable."""
    reason: str


Document = bytes | DamagedDocument
"""Text in UTF-8; b"" for an empty or null one."""


def parse_documents(file: InputReader, path: str, column: str) -> Iterator[Document]:
    """Yield the documents of a file in order, with one document and a few megabytes in memory.

    Args:
        file: Open file.
        path: Path or URL of the file, in a format that `detect_format` recognizes.
        column: Field or column that contains the text.

    Raises:
        ConfigError: If the file cannot be read, or its schema lacks a text column of this name.
    """
    detected = detect_format(path)
    assert detected is not None
    file_format, codec = detected
    if file_format == "lines":
        yield from _parse_lines(_read_blocks(file, codec), column)
        return
    read_batches = _read_parquet_batches if file_format == "parquet" else _read_arrow_batches
    yield from _parse_rows(read_batches(file, path, column))


def _read_blocks(file: InputReader, codec: str | None) -> Iterator[bytes]:
    stream: Any = file
    if codec:
        stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
    while block := stream.read(BLOCK_BYTES):
        yield block
    if codec and not file.num_bytes_read:
        raise OSError(f"the file is empty, which is not valid {codec}")


def _split_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    for block in blocks:
        first, *rest = block.split(b"\n")
        parts.append(first)
        if rest:
            yield b"".join(parts)
            yield from rest[:-1]
            parts = [rest[-1]]
    yield b"".join(parts)


def _parse_lines(blocks: Iterator[bytes], column: str) -> Iterator[Document]:
    number = 0
    try:
        for number, line in enumerate(_split_lines(blocks), 1):
            row = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if row.strip():
                document = _parse_line(row, column)
                if isinstance(document, bytes):
                    yield document
                else:
                    yield DamagedDocument(f"line {number}", document)
    except (pa.ArrowException, OSError) as error:
        yield DamagedDocument(f"after line {number}", _format_read_error(error))


def _format_read_error(error: Exception) -> str:
    return f"the rest is truncated or damaged ({str(error).splitlines()[0]})"


def _parse_line(line: bytes, column: str) -> bytes | str:
    """Return the text of a line in UTF-8, or as a string the reason why it is invalid."""
    try:
        row = _decode(str(line, "utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start})"
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    if not isinstance(row, dict):
        return f"is {_format_json_type(row)}, not an object"
    if column not in row:
        return f"has no field '{column}' (text_column=); it has {', '.join(row) or 'none'}"
    text = row[column]
    if text is None:
        return b""
    if not isinstance(text, str):
        return f"has {_format_json_type(text)} in '{column}', not a string"
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        return f"has half of a surrogate pair ({text[error.start]!r} at character {error.start})"


def _format_json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _parse_rows(batches: Iterator[pa.Array]) -> Iterator[Document]:
    row = 0
    try:
        for batch in batches:
            for value in _decode_values(batch):
                yield _validate_utf8(value, row)
                row += 1
    except (pa.ArrowException, OSError) as error:
        yield DamagedDocument(f"after {row} rows", _format_read_error(error))


def _decode_values(array: pa.Array) -> list[bytes | None]:
    if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        array.validate(full=True)  # the cast follows indices and views
        array = array.cast(pa.large_string())
    binary = array.cast(pa.large_binary())  # invalid UTF-8 then affects single documents
    binary.validate(full=True)
    values: list[bytes | None] = binary.to_pylist()
    return values


def _validate_utf8(value: bytes | None, row: int) -> Document:
    if value is None:
        return b""
    try:
        str(value, "utf-8")
    except UnicodeDecodeError as error:
        position = f"byte 0x{value[error.start]:02x} at position {error.start}"
        return DamagedDocument(f"row {row}", f"is not UTF-8 ({position})")
    return value


def _read_parquet_batches(file: InputReader, path: str, column: str) -> Iterator[pa.Array]:
    parquet = pq.ParquetFile(file, pre_buffer=False)
    validate_text_column(path, parquet.schema_arrow, column)
    for batch in parquet.iter_batches(ROWS_PER_READ, columns=[column], use_threads=False):
        yield batch.column(0)


def _read_arrow_batches(file: InputReader, path: str, column: str) -> Iterator[pa.Array]:
    is_arrow_file = file.read(6) == b"ARROW1"
    file.seek(0)
    native = pa.PythonFile(file, mode="r")
    options = pa.ipc.IpcReadOptions(use_threads=False)
    if is_arrow_file:
        reader = pa.ipc.open_file(native, options=options)
        batches: Any = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = reader = pa.ipc.open_stream(native, options=options)
    validate_text_column(path, reader.schema, column)
    for batch in batches:
        yield batch.column(column)
    file.seek(-len(_STREAM_END), 2)
    if not is_arrow_file and file.read(len(_STREAM_END)) != _STREAM_END:
        raise OSError("the end of the Arrow stream is missing")


def _is_string_type(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return _is_string_type(type_.value_type)
    return bool(
        pa.types.is_string(type_) or pa.types.is_large_string(type_) or str(type_) == "string_view"
    )


def validate_text_column(path: str, schema: pa.Schema, column: str) -> None:
    """Raise ConfigError if a schema lacks a text column of this name; list the text columns."""
    if column in schema.names and _is_string_type(schema.field(column).type):
        return
    text_columns = [field.name for field in schema if _is_string_type(field.type)]
    problem = f"is {schema.field(column).type}" if column in schema.names else "does not exist"
    raise ConfigError(
        f"{path}: its column '{column}' {problem}; its text columns are: "
        f"{', '.join(text_columns) or 'none'}; specify one with text_column=, or omit the file"
    )
