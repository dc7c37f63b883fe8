"""The documents of one file, in order, as UTF-8 bytes, and what is damaged among them.

Files of a terabyte's corpus are never read whole, and never all good. A document that is not one
comes out as Damage, with its place and with what was found there, so that whoever reads decides
what becomes of it; a file that ends too early gives what came before.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hlat.config.errors import ConfigError
from hlat.data.preparation.inputs import OpenInput, kind

BLOCK_BYTES = 1 << 20
ROWS_PER_READ = 256
"""Rows of a Parquet file in memory at once."""

_decode = json.JSONDecoder().decode
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True)
class Damage:
    """A document that cannot be had."""

    place: str
    """`line 12` (from 1) or `row 11` (from 0), or where the file stopped to be readable."""
    reason: str


Document = bytes | Damage
"""A text as UTF-8, b"" where it is empty or null."""


def read(path: str, column: str) -> Iterator[Document]:
    """Read the documents of a file.

    Args:
        path: An input's path or URL, of a kind that `inputs.kind` knows.
        column: The field or column that holds the text.

    Yields:
        The documents in order; the memory needed is that of one document and a few megabytes.

    Raises:
        ConfigError: If the file cannot be read, or its schema has no such column of text.
    """
    with OpenInput(path) as file:
        yield from read_open(file, path, column)


def read_open(file: OpenInput, path: str, column: str) -> Iterator[Document]:
    """As `read`, of a file that is open already and tells how much of it was read."""
    known = kind(path)
    assert known is not None
    held, codec = known
    if held == "lines":
        yield from _read_lines(_blocks(file, codec), column)
        return
    batches = _parquet_batches if held == "parquet" else _arrow_batches
    yield from _read_rows(batches(file, path, column))


def _blocks(file: OpenInput, codec: str | None) -> Iterator[bytes]:
    stream: Any = file
    if codec:
        stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
    while block := stream.read(BLOCK_BYTES):
        yield block
    if codec and not file.num_read:
        raise OSError(f"it is empty, which no {codec} file is")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their ends; a line may be as long as memory allows."""
    begun: list[bytes] = []
    for block in blocks:
        first, *rest = block.split(b"\n")
        begun.append(first)
        if rest:
            yield b"".join(begun)
            yield from rest[:-1]
            begun = [rest[-1]]
    yield b"".join(begun)


def _read_lines(blocks: Iterator[bytes], column: str) -> Iterator[Document]:
    number = 0
    try:
        for number, line in enumerate(_lines(blocks), 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                document = _parse(text, column)
                yield (
                    document if isinstance(document, bytes) else Damage(f"line {number}", document)
                )
    except (pa.ArrowException, OSError) as error:
        yield Damage(f"after line {number}", _unreadable(error))


def _unreadable(error: Exception) -> str:
    return f"the rest is cut off or damaged ({str(error).splitlines()[0]})"


def _parse(line: bytes, column: str) -> bytes | str:
    """The text of a line, or what is wrong with it."""
    try:
        row = _decode(str(line, "utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start})"
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    if not isinstance(row, dict):
        return f"is {_described(row)}, not an object"
    if column not in row:
        return f"has no field '{column}' (--text-column); it has {', '.join(row) or 'none'}"
    text = row[column]
    if text is None:
        return b""
    if not isinstance(text, str):
        return f"has {_described(text)} in '{column}', not a string"
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        return f"holds half of a surrogate pair ({text[error.start]!r} at character {error.start})"


def _described(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _read_rows(batches: Iterator[pa.Array]) -> Iterator[Document]:
    row = 0
    try:
        for batch in batches:
            for value in _values(batch):
                yield _checked(value, row)
                row += 1
    except (pa.ArrowException, OSError) as error:
        yield Damage(f"after {row} rows", _unreadable(error))


def _values(texts: pa.Array) -> list[bytes | None]:
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        texts.validate(full=True)  # indices and views are followed by the cast
        texts = texts.cast(pa.large_string())
    binary = texts.cast(pa.large_binary())  # as bytes, text that is not UTF-8 damages only itself
    binary.validate(full=True)
    values: list[bytes | None] = binary.to_pylist()
    return values


def _checked(value: bytes | None, row: int) -> Document:
    if value is None:
        return b""
    try:
        str(value, "utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{value[error.start]:02x} at position {error.start}"
        return Damage(f"row {row}", f"is not UTF-8 ({found})")
    return value


def _parquet_batches(file: OpenInput, path: str, column: str) -> Iterator[pa.Array]:
    parquet = pq.ParquetFile(file, pre_buffer=False)
    check_column(path, parquet.schema_arrow, column)
    for batch in parquet.iter_batches(ROWS_PER_READ, columns=[column], use_threads=False):
        yield batch.column(0)


def _arrow_batches(file: OpenInput, path: str, column: str) -> Iterator[pa.Array]:
    begin = file.read(6)
    file.seek(0)
    native = pa.PythonFile(file, mode="r")
    options = pa.ipc.IpcReadOptions(use_threads=False)
    if begin == b"ARROW1":
        reader = pa.ipc.open_file(native, options=options)
        batches: Any = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = reader = pa.ipc.open_stream(native, options=options)
    check_column(path, reader.schema, column)
    for batch in batches:
        yield batch.column(column)
    file.seek(-len(_STREAM_END), 2)
    if begin != b"ARROW1" and file.read(len(_STREAM_END)) != _STREAM_END:
        raise OSError("it does not end as Arrow streams do")


def _is_text(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return _is_text(type_.value_type)
    return bool(
        pa.types.is_string(type_) or pa.types.is_large_string(type_) or str(type_) == "string_view"
    )


def check_column(path: str, schema: pa.Schema, column: str) -> None:
    """Refuse a file whose schema has no such column of text, whatever its rows hold.

    Raises:
        ConfigError: Naming the columns that would do.
    """
    if column in schema.names and _is_text(schema.field(column).type):
        return
    strings = [field.name for field in schema if _is_text(field.type)]
    found = f"is {schema.field(column).type}" if column in schema.names else "is not there"
    raise ConfigError(
        f"{path}: its column '{column}' {found}; its columns of text are: "
        f"{', '.join(strings) or 'none'}; name one with --text-column, or take the file out"
    )
