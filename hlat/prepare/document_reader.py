"""Reader of the documents in text, JSON lines, Parquet and Arrow files, as UTF-8 bytes.

Files are read in bounded memory. A damaged document is returned as `DamagedDocument` with its
location and the reason, so that the caller decides how to handle it. A truncated file yields the
documents before the end.
"""

import json
import lzma
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa

from hlat.data import text_column
from hlat.prepare.input_files import InputReader, detect_format

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""Limit of a line or text file after decompression. Parsing a line needs several times its size."""
MAX_LINE_VALUES = 4_000_000
"""Limit of the lists and objects of a line, each of which takes 64 bytes of memory or more."""
_COUNTED_BYTES = 4 << 20
ROWS_PER_READ = 256
"""Rows of a Parquet file in memory at once."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TOO_LONG = f"is longer than {MAX_LINE_BYTES:,} bytes"
_LONG_LINE = f"{_TOO_LONG}; store longer documents in Parquet or Arrow files"
_LONG_TEXT = f"{_TOO_LONG}; divide the text into documents with separator="
_READ_ERRORS = (pa.ArrowException, OSError, EOFError, lzma.LZMAError)

_decode = json.JSONDecoder().decode


@dataclass(frozen=True)
class DamagedDocument:
    """Document that cannot be read."""

    location: str
    """`line 12` or `document 2` (from 1), `row 11` (from 0), or where the file gets unreadable."""
    reason: str


Document = bytes | DamagedDocument
"""Text in UTF-8; b"" for an empty or null one."""


def parse_documents(
    file: InputReader, path: str, column: str, separator: str | None = None
) -> Iterator[Document]:
    """Yield the documents of a file in order, with one document and a few megabytes in memory.

    A line or text of more than `MAX_LINE_BYTES` is damaged.

    Args:
        file: Open file.
        path: Path or URL of the file, in a format that `detect_format` recognizes.
        column: Field or column that contains the text.
        separator: Text between the documents of a text file; None: the file is one document.

    Raises:
        ConfigError: If the file cannot be read, or its schema lacks a text column of this name.
    """
    detected = detect_format(path)
    assert detected is not None
    file_format, codec = detected
    if file_format == "lines":
        yield from _parse_lines(_read_blocks(file, codec), column)
    elif file_format == "text":
        yield from _parse_texts(_read_blocks(file, codec), separator)
    elif codec is None:
        yield from _parse_columns(file, path, column)
    else:
        yield from _parse_compressed_columns(file, codec, path, column)


@contextmanager
def _decompress(file: InputReader, codec: str) -> Iterator[Any]:
    """Open the decompressed content of a file."""
    if codec == "xz":
        with lzma.LZMAFile(cast("BinaryIO", file)) as stream:
            yield stream
    else:
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec) as stream:
            yield stream


def _read_blocks(file: InputReader, codec: str | None) -> Iterator[bytes]:
    if codec is None:
        while block := file.read(BLOCK_BYTES):
            yield block
        return
    with _decompress(file, codec) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block
    if not file.num_bytes_read:
        raise OSError(f"the file is empty, which is not valid {codec}")


def _parse_columns(file: Any, path: str, column: str) -> Iterator[Document]:
    native = pa.PythonFile(file, mode="r")
    yield from _parse_rows(
        text_column.read_column(path, native, column, "text_column", rows_per_batch=ROWS_PER_READ)
    )


def _parse_compressed_columns(
    file: InputReader, codec: str, path: str, column: str
) -> Iterator[Document]:
    """Decompress Parquet or Arrow to a temporary file, since their readers seek."""
    with tempfile.TemporaryFile() as temporary:
        try:
            with _decompress(file, codec) as stream:
                shutil.copyfileobj(stream, temporary, BLOCK_BYTES)
        except _READ_ERRORS as error:
            yield DamagedDocument("at its start", _format_read_error(error))
            return
        temporary.seek(0)
        yield from _parse_columns(temporary, path, column)


def _split(blocks: Iterator[bytes], separator: bytes) -> Iterator[bytes | None]:
    """Yield the parts between separators, and None for each part of more than `MAX_LINE_BYTES`."""
    parts: list[bytes] = []
    num_bytes, is_too_long = 0, False
    tail = b""  # may be the beginning of a separator
    for block in blocks:
        first, *rest = (tail + block).split(separator)
        last = rest.pop() if rest else None
        end = first if last is None else last
        length = max(0, len(end) - len(separator) + 1)
        tail = end[length:]
        if last is None:
            first = first[:length]
        num_bytes += len(first)
        if num_bytes > MAX_LINE_BYTES and not is_too_long:
            yield None  # now, since its end may be terabytes away
            is_too_long = True
            parts.clear()
        if not is_too_long:
            parts.append(first)
        if last is not None:
            if not is_too_long:
                yield b"".join(parts)
            yield from rest
            parts, num_bytes, is_too_long = [last[:length]], length, False
    if not is_too_long:
        yield b"".join([*parts, tail])


def _join(blocks: Iterator[bytes]) -> bytes | None:
    """Return the concatenated blocks, or None if they have more than `MAX_LINE_BYTES`."""
    content = bytearray()
    for block in blocks:
        content += block
        if len(content) > MAX_LINE_BYTES:
            return None
    return bytes(content)


def _parse_texts(blocks: Iterator[bytes], separator: str | None) -> Iterator[Document]:
    """Yield a text as one document, or its parts without the newlines around separators."""
    number = 0
    try:
        parts = iter([_join(blocks)]) if separator is None else _split(blocks, separator.encode())
        for number, part in enumerate(parts, 1):
            if part is None:
                yield DamagedDocument(f"document {number}", _LONG_TEXT)
                continue
            text = part.removeprefix(_BYTE_ORDER_MARK) if number == 1 else part
            if separator is not None:
                text = text.strip(b"\r\n")
            yield _validate_utf8(text if text.strip() else b"", f"document {number}")
    except _READ_ERRORS as error:
        location = f"after document {number}" if number else "at its start"
        yield DamagedDocument(location, _format_read_error(error))


def _parse_lines(blocks: Iterator[bytes], column: str) -> Iterator[Document]:
    number = 0
    try:
        for number, line in enumerate(_split(blocks, b"\n"), 1):
            if line is None:
                yield DamagedDocument(f"line {number}", _LONG_LINE)
                continue
            row = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if row.strip():
                document = _parse_line(row, column)
                if isinstance(document, bytes):
                    yield document
                else:
                    yield DamagedDocument(f"line {number}", document)
    except _READ_ERRORS as error:
        yield DamagedDocument(f"after line {number}", _format_read_error(error))


def _format_read_error(error: Exception) -> str:
    return f"the rest is truncated or damaged ({str(error).splitlines()[0]})"


def _parse_line(line: bytes, column: str) -> bytes | str:
    """Return the text of a line in UTF-8, or as a string the reason why it is invalid."""
    if len(line) > _COUNTED_BYTES and line.count(b"[") + line.count(b"{") > MAX_LINE_VALUES:
        return f"has more than {MAX_LINE_VALUES:,} lists and objects"
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
                yield _validate_utf8(value, f"row {row}")
                row += 1
    except (pa.ArrowException, OSError, OverflowError) as error:
        yield DamagedDocument(f"after {row} rows", _format_read_error(error))


def _decode_values(array: pa.Array) -> list[bytes | None]:
    if not text_column.is_plain_text_type(array.type):
        array.validate(full=True)  # the cast follows indices and views
        array = array.cast(pa.large_string())
    binary = array.cast(pa.large_binary())  # invalid UTF-8 then affects single documents
    binary.validate(full=True)
    values: list[bytes | None] = binary.to_pylist()
    return values


def _validate_utf8(value: bytes | None, location: str) -> Document:
    if value is None:
        return b""
    try:
        str(value, "utf-8")
    except UnicodeDecodeError as error:
        position = f"byte 0x{value[error.start]:02x} at position {error.start}"
        return DamagedDocument(location, f"is not UTF-8 ({position})")
    return value
